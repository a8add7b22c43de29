"""Generated images at a URL: objects of their tenant in the store, for a time."""

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Final

import structlog

from headwater.actors.edge.history.objects import OBJECT_BYTES_MAX, TenantObjects
from headwater.actors.http.errors import ApiError, bad_request, overloaded
from headwater.schemas.messages.file_generation import ImageFormat

PATH: Final = "/v1/images/files/"

PAUSES_S: Final = (0.2, 1.0)
"""Before another attempt to store an image."""

STORE_S_MAX: Final = 15.0
"""For all images of a request: their client waits."""

_log = structlog.get_logger("headwater.images")

_ID: Final = re.compile(r"img_[0-9a-f]{32}\.(png|jpeg|webp)")


class ImageFiles:
    """The images of all tenants. An id names its format, and nothing of another tenant's."""

    def __init__(self, objects: TenantObjects | None) -> None:
        self._objects = objects

    def check_available(self) -> None:
        """Raises `ApiError` 400 if this edge stores nothing."""
        if self._objects is None:
            raise bad_request(
                "This server stores no images: set response_format to b64_json.", param="response_format"
            )

    async def put(self, tenant: str, data: bytes, format_: ImageFormat) -> str:
        """Store an image; returns the path of its URL. Raises `ApiError`."""
        self.check_available()
        assert self._objects is not None
        if len(data) > OBJECT_BYTES_MAX:
            raise bad_request(
                f"An image has {len(data)} bytes, and one at a URL at most {OBJECT_BYTES_MAX}: set response_format to "
                "b64_json, or output_format to jpeg.",
                param="response_format",
                code="image_too_large",
            )
        id_ = f"img_{secrets.token_hex(16)}.{format_}"
        try:
            await self._objects.put(tenant, "image", id_, data)
        except ApiError as error:
            raise _unavailable(error) from error
        return PATH + id_

    async def put_all(self, tenant: str, images: Sequence[bytes], format_: ImageFormat) -> list[str | None]:
        """Paths of their URLs; None for an image that the store did not take after some attempts, or has no room for.

        An image took seconds of a GPU: its client gets it with the response then, rather than an error to repeat.
        """
        paths: list[str | None] = []
        try:
            async with asyncio.timeout(STORE_S_MAX):
                for data in images:
                    paths.append(await self._put_again(tenant, data, format_, attempts=None not in paths))
        except TimeoutError:
            _log.warning("images_not_stored", images=len(images) - len(paths), reason="no answer in time")
        return paths + [None] * (len(images) - len(paths))

    async def _put_again(
        self, tenant: str, data: bytes, format_: ImageFormat, *, attempts: bool
    ) -> str | None:
        """Store an image, with further `attempts` if the store fails. None if it is not stored."""
        for pause_s in (*(PAUSES_S if attempts else ()), None):
            try:
                return await self.put(tenant, data, format_)
            except ApiError as error:
                if pause_s is None or error.status != 503:
                    _log.warning("images_not_stored", images=1, reason=str(error))
                    return None
                await asyncio.sleep(pause_s)
        raise AssertionError("the last attempt returns")

    async def get(self, tenant: str, path: str) -> tuple[bytes, bytes]:
        """An image and its media type. Raises `ApiError` 404 if this tenant has none there (any more)."""
        id_ = path.removeprefix(PATH)
        match = _ID.fullmatch(id_)
        found = None
        if match is not None and self._objects is not None:
            try:
                found = await self._objects.get(tenant, "image", id_)
            except ApiError as error:
                raise _unavailable(error) from error
        if match is None or found is None:
            raise ApiError(
                404, "There is no such image, or it has expired: generate it again.", code="image_not_found"
            )
        return found.data, b"image/" + match[1].encode()


def _unavailable(error: ApiError) -> ApiError:
    """The store's error, in the terms of this endpoint."""
    if error.status != 503:
        return error
    return overloaded("The store of images is not available; retry, or set response_format to b64_json.", 1.0)
