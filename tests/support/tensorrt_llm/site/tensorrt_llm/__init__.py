"""The double in the place of the package, for worker processes: this folder's parent is on their path."""

from tests.support.tensorrt_llm.processes import install

install(__name__)
