"""Conversions between messages and the core's types; every other module uses these."""

import lazy_loader

# Names are listed in `__init__.pyi`; each module is imported when a name of it is first used (decision 0008), so that
# a ClientApp, which needs power modes alone, loads neither fronts nor plans.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
