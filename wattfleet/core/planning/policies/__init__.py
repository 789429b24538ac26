"""Client-selection policies: which devices a round should select, and how many."""

import lazy_loader

# Names are listed in `__init__.pyi`; each module is imported when a name of it is first used (decision 0008).
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
