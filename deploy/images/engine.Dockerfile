# Headwater in the image of an engine's vendor, whose packages keep their versions. BASE and EXTRAS: see docker-bake.json.
ARG BASE
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

# hadolint ignore=DL3006
FROM ${BASE}
ARG EXTRAS=models,otel
USER 0
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home headwater \
    && install --directory --owner=10001 --group=10001 /models
COPY --from=build /wheels /wheels
# What the vendor installed is a constraint: a conflict ends the build, and no package of the engine is replaced.
RUN python3 -m pip list --format=freeze | grep --invert-match --ignore-case '^headwater' > /wheels/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /wheels/constraints.txt "$(ls /wheels/headwater-*.whl)[${EXTRAS}]" \
    && headwater warm
USER 10001:10001
ENTRYPOINT ["tini", "--"]
CMD ["headwater", "--help"]
