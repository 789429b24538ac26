"""The API for apps that answer requests on a device which also trains.

In the inference server:

    from wattfleet.serving import DutyServer

    server = DutyServer(model)
    output = await server.answer(request)

In the Flower app, around the data loader:

    from wattfleet.serving import share_device

    for batch in share_device(loader):

Both request turns from the device's agent. Without an agent, both continue at once.
"""

import lazy_loader

# Names are listed in `__init__.pyi`; each module is imported when one of its names is first used (decision 0008).
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
