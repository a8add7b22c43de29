"""Why an item of media was rejected: a code that clients can act on, and a message for people."""

from enum import StrEnum


class MediaCode(StrEnum):
    """The reasons. Each is the `code` of an error response: 400, or 503 for `media_busy` and `media_unavailable`."""

    BAD_URL = "media_bad_url"
    SCHEME = "media_scheme_not_allowed"
    BAD_HOST = "media_bad_host"
    HOST = "media_host_not_allowed"
    PORT = "media_port_not_allowed"
    PRIVATE_ADDRESS = "media_private_address"
    DNS = "media_host_not_found"
    REDIRECTS = "media_too_many_redirects"
    DOWNGRADE = "media_redirect_downgrade"
    FETCH_FAILED = "media_fetch_failed"
    BAD_RESPONSE = "media_bad_response"
    LENGTH_MISMATCH = "media_length_mismatch"
    CONTENT_ENCODING = "media_content_encoding"
    FETCH_TIMEOUT = "media_fetch_timeout"
    PATH = "media_path_not_allowed"
    BAD_BASE64 = "media_bad_base64"
    EMPTY = "media_empty"
    TOO_LARGE = "media_too_large"
    UNKNOWN_TYPE = "media_unknown_type"
    WRONG_TYPE = "media_wrong_type"
    NOT_TAKEN = "media_not_taken"
    MALFORMED = "media_malformed"
    TOO_MANY_PIXELS = "media_too_many_pixels"
    TOO_LONG = "media_too_long"
    TOO_MANY_CHANNELS = "media_too_many_channels"
    CODEC = "media_codec_not_allowed"
    EMBEDDINGS_OFF = "media_embeddings_not_allowed"
    BAD_EMBEDDING = "media_bad_embedding"
    TOO_MANY_PAGES = "media_too_many_pages"
    TOO_MUCH_TEXT = "media_too_much_text"
    NO_TEXT = "media_no_text"
    ENCRYPTED = "media_encrypted"
    DECODE_TIMEOUT = "media_decode_timeout"
    OUT_OF_MEMORY = "media_out_of_memory"
    DECODER_FAILED = "media_decoder_failed"
    BUSY = "media_busy"
    UNAVAILABLE = "media_unavailable"


class MediaError(Exception):
    """An item that is rejected. The message says what is wrong and what to do; it never has an address or a query."""

    def __init__(self, code: MediaCode, message: str) -> None:
        super().__init__(message)
        self.code = code
