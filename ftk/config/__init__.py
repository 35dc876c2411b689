"""Configuration: one dataclass per component, from which flags, Hydra groups, validation and dumps are made."""

from ftk.config.compose import compose
from ftk.config.root import Chosen, dump, load_yaml, section, slot

__all__ = ["Chosen", "compose", "dump", "load_yaml", "section", "slot"]
