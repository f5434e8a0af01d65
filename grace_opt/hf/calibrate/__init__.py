"""What is measured once for a model: `masks` of channels, a `basis` for bits, `budgets` of layers and heads."""
