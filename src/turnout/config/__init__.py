"""Options: one declaration gives flag, YAML key, default, check and reference line. No torch.

`load` reads a run's file and command line, `dump` writes what a run resolved to; `RunConfig` is between them.
"""

from turnout.config.load import dump, load
from turnout.config.run_config import RunConfig

__all__ = ["RunConfig", "dump", "load"]
