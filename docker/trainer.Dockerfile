# The trainer, with JAX for TPUs.
#
#     docker build -f docker/trainer.Dockerfile -t REGISTRY/untildone/trainer:0.1.0 .
ARG PYTHON_IMAGE=python:3.13-slim

FROM ${PYTHON_IMAGE} AS build
WORKDIR /build
COPY requirements/build.txt requirements/trainer.txt requirements/olmo.txt requirements/
RUN pip install --no-cache-dir --disable-pip-version-check -r requirements/build.txt \
 && python -m venv /opt/untildone \
 && /opt/untildone/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements/trainer.txt \
 && /opt/untildone/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps -r requirements/olmo.txt
COPY pyproject.toml README.md LICENSE ./
COPY orchestrator orchestrator
COPY trainer trainer
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir wheels . \
 && /opt/untildone/bin/pip install --no-cache-dir --no-deps wheels/*.whl \
 && /opt/untildone/bin/python -m compileall -q /opt/untildone/lib

FROM ${PYTHON_IMAGE}
COPY --from=build /opt/untildone /opt/untildone
ENV PATH=/opt/untildone/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /tmp
# A number, so that a kubelet can see that it is not root.
USER 65532:65532
ENTRYPOINT ["python", "-m", "trainer", "train"]
CMD ["--help"]
