{{/* A model with everything that it does not say itself, as YAML. Gets `root`, `name` and `model`. */}}
{{- define "headwater.model" -}}
{{- $root := .root -}}
{{- $name := .name -}}
{{- $model := mergeOverwrite (deepCopy $root.Values.modelDefaults) (deepCopy (.model | default dict)) -}}
{{- $at := printf "models.%s" $name -}}
{{- if gt (len $name) 16 }}{{ fail (printf "%s: the name has more than 16 characters; clients see modelArtifacts.name" $at) }}{{ end -}}
{{- range $role := list "decode" "prefill" "encode" -}}
{{- $merged := mergeOverwrite (deepCopy $root.Values.workerDefaults) (deepCopy (get $model $role | default dict)) -}}
{{- $_ := set $model $role $merged -}}
{{- include "headwater.checkRole" (dict "at" (printf "%s.%s" $at $role) "role" $role "of" $merged "model" $model) -}}
{{- end -}}
{{- $prefill := gt (int $model.prefill.replicas) 0 -}}
{{- if and $prefill (lt (int $model.decode.replicas) 1) }}{{ fail (printf "%s: prefill workers need decode workers" $at) }}{{ end -}}
{{- if and $model.disaggregatedSet (not $prefill) }}{{ fail (printf "%s.disaggregatedSet: needs prefill workers" $at) }}{{ end -}}
{{- if and (ne $model.engine "sim") (not $model.modelArtifacts.uri) }}{{ fail (printf "%s.modelArtifacts.uri: say where the weights are: hf://ORG/NAME, pvc://CLAIM/PATH, …" $at) }}{{ end -}}
{{- if and (ne $model.engine "sim") (not $model.modelArtifacts.name) }}{{ fail (printf "%s.modelArtifacts.name: give the name that clients use" $at) }}{{ end -}}
{{- if and (eq $model.engine "tensorrt_llm") (or $prefill $model.multinode (gt (int $model.encode.replicas) 0)) }}{{ fail (printf "%s.engine: tensorrt_llm is deployed without roles and on one node" $at) }}{{ end -}}
{{- toYaml $model -}}
{{- end }}

{{/* Fails for combinations that no engine has. */}}
{{- define "headwater.checkRole" -}}
{{- $p := .of.parallelism -}}
{{- $world := mul $p.tensor $p.pipeline $p.data | int -}}
{{- $nodes := int $p.workers -}}
{{- if gt (int .of.replicas) 0 -}}
{{- if and (gt $nodes 1) (not .model.multinode) }}{{ fail (printf "%s.parallelism.workers: %d nodes need `multinode: true`, and LeaderWorkerSet in the cluster" .at $nodes) }}{{ end -}}
{{- if and (gt $nodes 1) (eq .role "encode") }}{{ fail (printf "%s.parallelism.workers: an encode worker has one node" .at) }}{{ end -}}
{{- if ne (mod $world $nodes) 0 }}{{ fail (printf "%s.parallelism: tensor × pipeline × data = %d devices cannot be divided among %d nodes" .at $world $nodes) }}{{ end -}}
{{- if ne (mul $p.dataLocal $nodes | int) (gt (int $p.data) 1 | ternary (int $p.data) $nodes) }}{{ fail (printf "%s.parallelism: dataLocal must be data / workers, which is %d / %d" .at (int $p.data) $nodes) }}{{ end -}}
{{- if and (gt $nodes 1) (gt (int $p.data) 1) (ne .model.engine "vllm") }}{{ fail (printf "%s.parallelism.data: data-parallel ranks on several nodes are vLLM's only" .at) }}{{ end -}}
{{- if and (gt $nodes 1) (eq .model.engine "sglang") (gt (int .model.prefill.replicas) 0) }}{{ fail (printf "%s.parallelism.workers: SGLang's prefill and decode workers have one node each" .at) }}{{ end -}}
{{- if and (gt $world 1) (eq .model.engine "sim") }}{{ fail (printf "%s.parallelism: the simulated engine has none" .at) }}{{ end -}}
{{- if and .of.args (eq .model.engine "sim") }}{{ fail (printf "%s.args: the simulated engine has no arguments of its own; use headwaterArgs" .at) }}{{ end -}}
{{- end -}}
{{- end }}

{{/* Where weights come from, as YAML: `model` (empty: the engine's own), a volume and its mount, whether they are downloaded. */}}
{{- define "headwater.weights" -}}
{{- $artifacts := .artifacts -}}
{{- $uri := tpl $artifacts.uri .root -}}
{{- $scheme := regexFind "^[a-z0-9+]+://" $uri -}}
{{- $rest := trimPrefix $scheme $uri -}}
{{- $parts := splitList "/" $rest -}}
{{- $found := dict "model" $uri "downloads" true "mount" $artifacts.mountPath -}}
{{- if or (eq $scheme "pvc://") (eq $scheme "pvc+hf://") -}}
{{- if lt (len $parts) 2 }}{{ fail (printf "%s: give %sCLAIM/…" $uri $scheme) }}{{ end -}}
{{- $readOnly := and (eq $scheme "pvc://") $artifacts.readOnly -}}
{{- $_ := set $found "volume" (dict "persistentVolumeClaim" (dict "claimName" (first $parts) "readOnly" $readOnly)) -}}
{{- $_ := set $found "readOnly" $readOnly -}}
{{- $path := join "/" (rest $parts) -}}
{{- $_ := set $found "model" (eq $scheme "pvc://" | ternary (printf "%s/%s" $artifacts.mountPath $path) $path) -}}
{{- $_ := set $found "downloads" (ne $scheme "pvc://") -}}
{{- else if eq $scheme "oci://" -}}
{{- $_ := set $found "volume" (dict "image" (dict "reference" $rest "pullPolicy" "IfNotPresent")) -}}
{{- $_ := set $found "readOnly" true -}}
{{- $_ := set $found "model" $artifacts.mountPath -}}
{{- $_ := set $found "downloads" false -}}
{{- else if $uri -}}
{{- if eq $scheme "hf://" }}{{ $_ := set $found "model" $rest }}{{ end -}}
{{- $_ := set $found "volume" (dict "emptyDir" (dict "sizeLimit" $artifacts.size)) -}}
{{- else -}}
{{- $_ := set $found "downloads" false -}}
{{- end -}}
{{- if and $artifacts.revision (not (has $scheme (list "hf://" "pvc+hf://"))) }}{{ fail (printf "modelArtifacts.revision: %s has none; only models of a hub do" $uri) }}{{ end -}}
{{- toYaml $found -}}
{{- end }}

{{/* The device that an accelerator is requested as; empty for a CPU. */}}
{{- define "headwater.device" -}}
{{- get (dict "nvidia" "nvidia.com/gpu" "amd" "amd.com/gpu" "google" "google.com/tpu" "intel-gaudi" "habana.ai/gaudi" "intel-xe" "gpu.intel.com/xe" "cpu" "") .Values.accelerator.type -}}
{{- end }}

{{/* Limits and requests of a worker's pod, with its devices. */}}
{{- define "headwater.workerResources" -}}
{{- $resources := deepCopy .of.resources -}}
{{- $device := eq .values.engine "sim" | ternary "" (include "headwater.device" .root) -}}
{{- if $device -}}
{{- $p := .of.parallelism -}}
{{- $count := div (mul $p.tensor $p.pipeline $p.data) $p.workers -}}
{{- $_ := set $resources "limits" (merge (dict $device $count) ($resources.limits | default dict)) -}}
{{- $_ := set $resources "requests" (merge (dict $device $count) ($resources.requests | default dict)) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end }}

{{/*
The command of a worker, one argument a line. Gets `role`, `of` (its values), `model`, `name` and `node`: "" for a worker of one node,
"leader" or "follower" otherwise. A follower computes only; it has no role, and is no worker of the fleet.
*/}}
{{- define "headwater.workerArgs" -}}
{{- $model := .values -}}
{{- $follower := eq .node "follower" -}}
{{- $p := .of.parallelism -}}
{{- $nodes := int $p.workers -}}
{{- $split := gt (int $model.prefill.replicas) 0 -}}
{{- $encoded := gt (int $model.encode.replicas) 0 -}}
{{- $weights := include "headwater.weights" (dict "root" .root "artifacts" $model.modelArtifacts) | fromYaml -}}
{{- $vllm := eq $model.engine "vllm" -}}
{{- $sglang := eq $model.engine "sglang" -}}
{{- $args := list "headwater" "engine" $model.engine "--name=$(POD_NAME)" "--workers=1" (printf "--drain-timeout=%v" .of.drainSeconds) -}}
{{- with $weights.model }}{{ $args = append $args (printf "--model=%s" .) }}{{ end -}}
{{- with $model.modelArtifacts.revision }}{{ $args = append $args (printf "--model-revision=%s" .) }}{{ end -}}
{{- with $model.modelArtifacts.name }}{{ $args = append $args (printf "--served-model-name=%s" .) }}{{ end -}}
{{- with int $model.blockSize }}{{ $args = append $args (printf "--block-size=%d" .) }}{{ end -}}
{{- with int $model.maxModelLen }}{{ $args = append $args (printf "--max-model-len=%d" .) }}{{ end -}}
{{- if and (not $follower) (or $split (eq .role "encode")) }}{{ $args = append $args (printf "--role=%s" .role) }}{{ end -}}
{{- if and $encoded (or (eq .role "prefill") (and (eq .role "decode") (not $split))) }}{{ $args = append $args "--embeddings=read=true" }}{{ end -}}
{{- if and $split (ne .role "encode") -}}
{{- if $vllm }}{{ $args = concat $args (list "--handoff-host=$(POD_IP)" "--handoff-port=5600") }}{{ end -}}
{{- if and $vllm (gt $nodes 1) }}{{ $args = append $args "--connector=nixl" }}{{ end -}}
{{- if $sglang }}{{ $args = append $args "--handoff-host=$(POD_IP)" }}{{ end -}}
{{- if and $sglang (eq .role "prefill") }}{{ $args = append $args "--handoff-port=8998" }}{{ end -}}
{{- end -}}
{{- with .root.Values.tracer.otlp }}{{ $args = append $args (printf "--otlp=%s" .) }}{{ end -}}
{{- $args = concat $args .of.headwaterArgs -}}
{{- $native := list -}}
{{- if gt (int $p.tensor) 1 }}{{ $native = append $native (printf "--%s=%v" ($sglang | ternary "tp-size" "tensor-parallel-size") $p.tensor) }}{{ end -}}
{{- if gt (int $p.pipeline) 1 }}{{ $native = append $native (printf "--%s=%v" ($sglang | ternary "pp-size" "pipeline-parallel-size") $p.pipeline) }}{{ end -}}
{{- if gt (int $p.data) 1 }}{{ $native = append $native (printf "--%s=%v" ($sglang | ternary "dp-size" "data-parallel-size") $p.data) }}{{ end -}}
{{- if .node -}}
{{- $rank := $follower | ternary "$(LWS_WORKER_INDEX)" "0" -}}
{{- if $sglang -}}
{{- $native = concat $native (list (printf "--nnodes=%d" $nodes) (printf "--node-rank=%s" $rank) "--dist-init-addr=$(LWS_LEADER_ADDRESS):29500") -}}
{{- else if gt (int $p.data) 1 -}}
{{- $native = concat $native (list (printf "--data-parallel-size-local=%v" $p.dataLocal) "--data-parallel-address=$(LWS_LEADER_ADDRESS)" "--data-parallel-rpc-port=29550") -}}
{{- else -}}
{{- $native = concat $native (list (printf "--nnodes=%d" $nodes) (printf "--node-rank=%s" $rank) "--master-addr=$(LWS_LEADER_ADDRESS)" "--master-port=29500") -}}
{{- end -}}
{{- end -}}
{{- $native = concat $native .of.args -}}
{{- if $native }}{{ $args = concat $args (list "--") $native }}{{ end -}}
{{- if and $follower $vllm (gt (int $p.data) 1) -}}
{{- /* The first rank of a node is a product, which a manifest cannot compute. */ -}}
{{- $args = concat (list "sh" "-c" (printf "exec \"$@\" --headless --data-parallel-start-rank=$((LWS_WORKER_INDEX * %v))" $p.dataLocal) "sh") $args -}}
{{- end -}}
{{- toYaml $args -}}
{{- end }}

{{/* The pod of a worker. */}}
{{- define "headwater.workerPod" -}}
{{- $root := .root -}}
{{- $of := .of -}}
{{- $model := .values -}}
{{- $weights := include "headwater.weights" (dict "root" $root "artifacts" $model.modelArtifacts) | fromYaml -}}
{{- $image := eq $model.engine "sim" | ternary $root.Values.image (get $root.Values.engineImages $model.engine) -}}
metadata:
  labels: {{ include "headwater.podLabels" . | nindent 4 }}
{{- with merge (dict) $of.podAnnotations $root.Values.podAnnotations }}
  annotations: {{ toYaml . | nindent 4 }}
{{- end }}
spec: {{ include "headwater.podSpec" . | nindent 2 }}
{{- with include "headwater.placement" . }}
{{ . | trim | indent 2 }}
{{- end }}
  terminationGracePeriodSeconds: {{ add $of.drainSeconds 30 }}
  containers:
    - name: engine
      image: {{ $of.image | default (include "headwater.image" (dict "root" $root "image" $image)) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args: {{ include "headwater.workerArgs" . | nindent 8 }}
      env: {{ include "headwater.env" . | nindent 8 }}
        {{- include "headwater.streamsEnv" . | nindent 8 }}
        {{- include "headwater.metricsEnv" . | nindent 8 }}
{{- if $weights.downloads }}
        - name: HF_HOME
          value: {{ $weights.mount }}
{{- end }}
{{- with $of.env }}
        {{- toYaml . | nindent 8 }}
{{- end }}
{{- with $model.modelArtifacts.authSecretName }}
      envFrom:
        - secretRef: {name: {{ . }}}
{{- end }}
      ports: {{ include "headwater.metricsPort" . | nindent 8 }}
{{- if ne .node "follower" }}
      # The model loads: the event loop may be blocked for minutes, and that must not count as dead.
      startupProbe:
        httpGet: {path: /health, port: metrics}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $of.startupSeconds 4) 5 }}
      livenessProbe:
        httpGet: {path: /live, port: metrics}
        periodSeconds: 10
        timeoutSeconds: 5
      # Ready: its present incarnation has joined in the log of its pool, so routers choose it.
      readinessProbe:
        httpGet: {path: /health, port: metrics}
        periodSeconds: 2
        timeoutSeconds: 2
        failureThreshold: 2
{{- else }}
      lifecycle:
        preStop:
          exec:
            # Its leader still computes what is in progress, and needs it; it ends with its leader.
            command: [sleep, "{{ $of.drainSeconds }}"]
{{- end }}
      resources: {{ include "headwater.workerResources" . | nindent 8 }}
      securityContext: {{ mergeOverwrite (deepCopy $root.Values.containerSecurityContext) (deepCopy $of.containerSecurityContext) | toYaml | nindent 8 }}
      volumeMounts: {{ include "headwater.mounts" . | nindent 8 }}
        - {name: shm, mountPath: /dev/shm}
{{- if $weights.volume }}
        - {name: weights, mountPath: {{ $weights.mount }}{{ if $weights.readOnly }}, readOnly: true{{ end }}}
{{- end }}
{{- with $of.volumeMounts }}
        {{- toYaml . | nindent 8 }}
{{- end }}
  volumes: {{ include "headwater.volumes" . | nindent 4 }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $of.shmSize }}}
{{- with $weights.volume }}
    - name: weights
{{ toYaml . | indent 6 }}
{{- end }}
{{- with $of.volumes }}
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* The spec of a LeaderWorkerSet: the workers of one role, of several nodes each, or of one in a DisaggregatedSet. */}}
{{- define "headwater.leaderWorkerSpec" -}}
{{- $nodes := int .of.parallelism.workers -}}
replicas: {{ .of.replicas }}
startupPolicy: LeaderCreated
rolloutStrategy:
  type: RollingUpdate
  rollingUpdateConfiguration: {{ toYaml .of.strategy | nindent 4 }}
leaderWorkerTemplate:
  size: {{ $nodes }}
  # An engine has lost a part of itself with any of its nodes.
  restartPolicy: RecreateGroupOnPodRestart
{{- if gt $nodes 1 }}
  leaderTemplate: {{ include "headwater.workerPod" (merge (dict "node" "leader") .) | nindent 4 }}
  workerTemplate: {{ include "headwater.workerPod" (merge (dict "node" "follower") .) | nindent 4 }}
{{- else }}
  workerTemplate: {{ include "headwater.workerPod" . | nindent 4 }}
{{- end }}
{{- end }}
