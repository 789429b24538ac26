"""Round planning: which devices train in which power mode, with the least makespan within every supply's budget."""

import lazy_loader

# Names are listed in `__init__.pyi`; each module is imported when a name of it is first used (decision 0008).
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
