"""Storages that refuse tasks for lack of credentials: requests of the driver succeed, those of tasks fail as on S3."""

import os
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from tiered_index.spark.addresses import StorageAddress
from tiered_index.storage.base import Call, Storage, WrapperStorage
from tiered_index.storage.s3.boto import translate


class Denying(WrapperStorage):
    """Refuses the operations in `denied`."""

    def __init__(self, inner: Storage, denied: tuple[str, ...]) -> None:
        super().__init__(inner)
        self._denied = denied

    def _around(self, call: Call, act: Any) -> Any:
        if call.operation in self._denied:
            answer: Any = {
                "Error": {"Code": "AccessDenied", "Message": "Access Denied"},
                "ResponseMetadata": {"HTTPStatusCode": 403},
            }
            raise translate(ClientError(answer, call.operation), doing=call.operation, uri=self.uri, name=call.name)
        return act()


@dataclass(frozen=True)
class DenyingAddress(StorageAddress):
    """Opens a plain storage in the driver, and a `Denying` one in tasks."""

    denied: tuple[str, ...] = ()
    driver: int = 0

    def open(self) -> Storage:
        """Return the storage."""
        inner = super().open()
        return inner if os.getpid() == self.driver else Denying(inner, self.denied)
