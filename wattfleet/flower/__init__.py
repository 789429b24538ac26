"""What a Flower app imports: round plans for the ServerApp, power modes for the ClientApp.

On the server, wrap the strategy:

    from wattfleet.flower import PowerAware

    strategy = PowerAware(FedAvg(), coordinator="127.0.0.1:7070")

On the device, add the mod:

    from wattfleet.flower import power_mode_mod

    app = ClientApp(mods=[power_mode_mod])

An app that trains by `for batch in until_deadline(loader)` stops in time for its round; the work done so far is kept
and weighted. One that trains by `for batch in profiled(loader)` lets the agent measure power modes during training.
Both combine: `until_deadline(profiled(loader))`.
"""

import lazy_loader

# Names are listed in `__init__.pyi`; each module is imported when a name of it is first used (decision 0008), so that
# a ClientApp loads nothing of the server side.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
