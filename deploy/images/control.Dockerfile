# Edges, routers, the operator, console, admin port, tracer and picker; NATS's server; simulated engines.
# From the repository's root: docker buildx bake --file deploy/images/docker-bake.json control
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
# As process 1 a program ignores SIGTERM until it handles it, and nobody reaps what its children leave: tini does both for it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home headwater \
    && install --directory --owner=10001 --group=10001 /data
COPY --from=build /wheels /wheels
# The kernels are compiled for the processor that the image is built on; on another one each pod compiles them at its start.
RUN pip install --no-cache-dir "$(ls /wheels/headwater-*.whl)[media,models,otel,picker]" && headwater warm
USER 10001:10001
ENTRYPOINT ["tini", "--"]
CMD ["headwater", "--help"]
