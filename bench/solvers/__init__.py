"""Our solvers and other people's on the same instances: ``python -m bench.solvers``.

``fetch`` gets or makes the instances, ``run`` measures, ``report`` writes the page; ``all`` does all three. A cell is
one suite × instance × k × method × seed × time limit, measured by `grace_opt.sweep` in a warm process of its method.
"""
