"""`nanoengine serve`: a server with OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, closing
from dataclasses import asdict, fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nanoengine.cli.flags import add_flag, engine_config
from nanoengine.cli.interrupts import ended_by_ctrl_c
from nanoengine.cli.usage import UsageError
from nanoengine.devices.logs import LOG_LEVEL, show_logs
from nanoengine.errors import ConfigError
from nanoengine.serving.listener import listen
from nanoengine.serving.options import API_KEY, OPTIONS, ServerOptions

LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")  # of the extra `server`


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each field of ServerOptions."""
    target = parser.add_argument_group("server")
    known = {field.name: field for field in fields(ServerOptions)}
    for name, text in OPTIONS.items():
        default = known[name].default
        shown = f" [{default}]" if default not in (None, ()) else ""
        add_flag(target, known[name], text + shown)


def server_options(
    args: argparse.Namespace, environ: Mapping[str, str] = os.environ
) -> ServerOptions:
    """The ServerOptions of flags and environment. Raises UsageError for a bad value."""
    given: dict[str, Any] = {name: getattr(args, name) for name in OPTIONS if hasattr(args, name)}
    if "api_key" not in given and API_KEY in environ:
        given["api_key"] = environ[API_KEY]
    if "allow_origins" in given:
        given["allow_origins"] = tuple(given["allow_origins"])
    try:
        return ServerOptions(**given)
    except ConfigError as error:
        raise UsageError(str(error)) from error


def serve(args: argparse.Namespace) -> int:
    """Load the model and answer requests; returns the exit status."""
    start = time.perf_counter()
    config, options = engine_config(args), server_options(args)
    for name in LIBRARIES:
        if find_spec(name) is None:
            raise UsageError(f"the server needs {name}: pip install 'nanoengine[server]'")
    if not args.log_level and LOG_LEVEL not in os.environ:
        show_logs("warning" if args.quiet else "info")

    def say(text: str) -> None:
        if not args.quiet:
            print(text, file=sys.stderr, flush=True)

    with ExitStack() as started:
        listener = started.enter_context(listen(options.host, options.port))
        say(f"loading {config.model} ...")
        # The HTTP libraries are imported while weights are packed.
        with ended_by_ctrl_c(), ThreadPoolExecutor(1) as thread:
            library = thread.submit(import_module, "nanoengine.serving.server")
            engine = _loaded(asdict(config), options, started)
            server = library.result()
        address = url(options.host, listener.getsockname()[1])
        if options.is_open:
            print(
                f"warning: everybody who reaches {address} may use it; --api-key or ${API_KEY} "
                "asks for a key",
                file=sys.stderr,
            )

        def on_start() -> None:
            say(
                f"ready after {time.perf_counter() - start:.1f} s; OpenAI's API is at "
                f"{address}/v1, a chat page at {address}/"
            )

        asyncio.run(server.serve(engine, options, listener, on_start))
    say("stopped")
    return 0


def _loaded(
    settings: dict[str, Any], options: ServerOptions, started: ExitStack
) -> AbstractAsyncContextManager[Any]:
    """Load the model, here or in a process of its own, until `started` ends; connects to it."""
    if options.engine_process:
        from nanoengine.serving.engine_process import EngineProcess

        return started.enter_context(closing(EngineProcess(settings))).connected()
    from nanoengine import AsyncLLM  # imports torch, which takes a second
    from nanoengine.serving.loaded_model import connected

    model = settings.pop("model")
    return connected(started.enter_context(closing(AsyncLLM(model, **settings))))


def url(host: str, port: int) -> str:
    """Where clients on this machine find the server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
