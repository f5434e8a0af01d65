"""The models below a cache: loaded, recognised, switched to our attention, and observed."""

from .loading import POCKET_BASIS as POCKET_BASIS
from .loading import POCKET_FOLDER as POCKET_FOLDER
from .loading import ModelError as ModelError
from .loading import disable_progress_bars as disable_progress_bars
from .loading import load_model as load_model
from .loading import load_pocket as load_pocket
