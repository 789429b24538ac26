"""Answers images over HTTP on a device that also trains: `DutyServer` takes turns with training through the agent."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor, nn

from wattfleet.serving import DutyServer, RequestRefusedError
from wattfleet_proto.names import DEFAULT_SOCKET

network = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))
network.eval()


def classify(images: list[Tensor]) -> list[int]:
    """The predicted class of each `[1, 8, 8]` image in a batch."""
    with torch.no_grad():
        return network(torch.stack(images)).argmax(1).tolist()


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    """Run the duty server with the app. A first image warms the network up, and sets the shape of all others."""
    with DutyServer(classify, largest_batch=16, agent_socket=os.environ.get("AGENT_SOCKET", DEFAULT_SOCKET)) as server:
        await server.answer(torch.zeros(1, 8, 8))
        app.state.server = server
        yield


async def answer(request: Request) -> JSONResponse:
    """Classify the image in a request's JSON."""
    try:
        image = torch.tensor(await request.json(), dtype=torch.float32)
        return JSONResponse({"class": await request.app.state.server.answer(image)})
    except (ValueError, TypeError, RequestRefusedError) as error:
        return JSONResponse({"error": str(error)}, status_code=400)


app = Starlette(routes=[Route("/classify", answer, methods=["POST"])], lifespan=lifespan)
