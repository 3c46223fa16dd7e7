"""What the client's errors mean and what to do about them. Its messages hold no secret: URLs with a signature are left out."""

from __future__ import annotations

import os
import re

from everlong.contracts.os_errors import explain_os_error

# S3 and what speaks like it, GCS, Azure. Only the body of an answer tells a missing bucket from a missing object.
_NO_BUCKET = (
    "NoSuchBucket",
    "specified bucket does not exist",
    "ContainerNotFound",
    "specified container does not exist",
)
_CODE = re.compile(r"<Code>([A-Za-z]+)</Code>")
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
"""How a folder's client says what the system refused."""
_METADATA_SERVICE = ("169.254.169.254", "metadata.google.internal")
"""Whom clients ask for credentials last, on a machine of the cloud."""


def bucket_is_missing(error: Exception) -> bool:
    return any(mark in str(error) for mark in _NO_BUCKET)


def nobody_answered(error: Exception) -> bool:
    return "error sending request" in str(error).split("\n")[0]


def reason_of(error: Exception) -> str:
    """The first line of the message (a dump of the client's types follows it) and what to do about it."""
    text = str(error).strip()
    if not nobody_answered(error) and (number := _OS_ERROR.search(text.split("\n")[0])):
        return explain_os_error(OSError(int(number[1]), os.strerror(int(number[1]))))
    line = text.split("\n")[0].removesuffix('<?xml version="1.0" encoding="UTF-8"?>').rstrip(": ")
    if (code := _CODE.search(text)) and code[1] not in line:
        line = f"{line} ({code[1]})"
    return f"{line}: {advice}" if (advice := _advice(error, line)) else line


def _advice(error: Exception, line: str) -> str:
    if bucket_is_missing(error):
        return "the bucket does not exist there: create it, or correct the store's URL, the region or the endpoint"
    if any(host in line for host in _METADATA_SERVICE):
        return "no credentials were found: set them in the environment (docs/storage.md names the variables)"
    if "401 Unauthorized" in line or "403 Forbidden" in line:
        return "the server refused the credentials: check those in the environment, and what they may do in the bucket"
    if nobody_answered(error):
        return "nobody answered there: check the endpoint and the network; `everlong resume` goes on with a run"
    return ""
