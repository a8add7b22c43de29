{{/* Names, labels, images, and the parts that all pods share. Each helper gets a dict with `root`, the chart's context. */}}

{{/* The prefix of all names. Pods' names are names of workers, which have at most 64 characters. */}}
{{- define "headwater.fullname" -}}
{{- $name := .Values.fullnameOverride | default (contains "headwater" .Release.Name | ternary .Release.Name (printf "%s-headwater" .Release.Name)) -}}
{{- if gt (len $name) 30 }}{{ fail (printf "the prefix of all names, %q, has more than 30 characters: set fullnameOverride" $name) }}{{ end -}}
{{- $name -}}
{{- end }}

{{- define "headwater.image" -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .root.Chart.AppVersion) -}}
{{- end }}

{{/* Labels by which a component is selected: `component`, and for those of one model its name in `model`. */}}
{{- define "headwater.selector" -}}
app.kubernetes.io/name: headwater
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
headwater-model: {{ . }}
{{- end }}
{{- end }}

{{- define "headwater.labels" -}}
{{ include "headwater.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "headwater.podLabels" -}}
{{ include "headwater.selector" . }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What every pod's spec has. */}}
{{- define "headwater.podSpec" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext: {{ toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- end }}

{{/* Where pods run: `of` has the values. */}}
{{- define "headwater.placement" -}}
{{- with .of.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .of.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .of.topologySpreadConstraints }}
topologySpreadConstraints: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The replicas of one component on different nodes where that is possible. */}}
{{- define "headwater.spread" -}}
{{- if not .of.topologySpreadConstraints }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "headwater.selector" . | nindent 8 }}
{{- end }}
{{- end }}

{{/* URLs of the NATS servers. */}}
{{- define "headwater.natsUrl" -}}
{{- if .Values.nats.enabled -}}
{{- $name := printf "%s-nats" (include "headwater.fullname" .) -}}
{{- $urls := list -}}
{{- range $number := until (int .Values.nats.replicas) -}}
{{- $urls = append $urls (printf "nats://%s-%d.%s:4222" $name $number $name) -}}
{{- end -}}
{{- join "," $urls -}}
{{- else -}}
{{- required "nats.url: give the URLs of your NATS servers, or set nats.enabled" .Values.nats.url -}}
{{- end -}}
{{- end }}

{{- define "headwater.streamReplicas" -}}
{{- .Values.nats.streamReplicas | default (.Values.nats.enabled | ternary .Values.nats.replicas 1) -}}
{{- end }}

{{/* Bytes of a size in MiB, GiB or TiB. */}}
{{- define "headwater.bytes" -}}
{{- $unit := dict "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" .) (get $unit (regexFind "[A-Z]i$" .)) -}}
{{- end }}

{{/* Fails where the logs of all models do not fit on the volume of a NATS server. */}}
{{- define "headwater.checkStorage" -}}
{{- $reserved := add (mul (max 1 (len .Values.models)) (int64 .Values.nats.poolBytes)) (int64 .Values.nats.requestBytes) (int64 .Values.nats.responseBytes) -}}
{{- if lt (int64 (include "headwater.bytes" .Values.nats.storage.size)) $reserved -}}
{{- fail (printf "nats.storage.size: %s is too small: the logs of %d models and of requests reserve %d MiB (nats.poolBytes, requestBytes, responseBytes)" .Values.nats.storage.size (len .Values.models) (div $reserved 1048576)) -}}
{{- end -}}
{{- end }}

{{/* What all of Headwater's processes need. The name of a pod is the name of its worker, router or edge. */}}
{{- define "headwater.env" -}}
- name: POD_NAME
  valueFrom:
    fieldRef: {fieldPath: metadata.name}
- name: POD_IP
  valueFrom:
    fieldRef: {fieldPath: status.podIP}
- name: HEADWATER_NATS
  value: {{ include "headwater.natsUrl" .root | quote }}
- name: HEADWATER_NAMESPACE
  value: {{ .root.Values.fleetNamespace | quote }}
- name: HEADWATER_LOG_FORMAT
  value: json
- name: HEADWATER_LOG_LEVEL
  value: {{ .root.Values.logLevel }}
{{- if .root.Values.nats.keysSecretName }}
- name: HEADWATER_NATS_KEYS_DIR
  value: /etc/headwater/keys
{{- end }}
{{- if .root.Values.nats.tlsSecretName }}
- name: HEADWATER_NATS_TLS_CA
  value: /etc/headwater/nats-ca/ca.crt
{{- end }}
# The only folders that can be written. Of users without an entry in /etc/passwd libraries ask the variable.
- name: HOME
  value: /var/cache/headwater
- name: HEADWATER_CACHE_DIR
  value: /var/cache/headwater
- name: USER
  value: headwater
{{- end }}

{{/* The bounds of streams, for the operator that makes them and for those that make what is missing. */}}
{{- define "headwater.streamsEnv" -}}
- name: HEADWATER_REPLICAS
  value: {{ include "headwater.streamReplicas" .root | quote }}
- name: HEADWATER_STREAM_SIZES
  value: {{ printf "stored=%d,requests=%d,pool=%d" (int64 .root.Values.nats.responseBytes) (int64 .root.Values.nats.requestBytes) (int64 .root.Values.nats.poolBytes) | quote }}
{{- end }}

{{- define "headwater.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: cache
  mountPath: /var/cache/headwater
{{- if .root.Values.nats.keysSecretName }}
- name: keys
  mountPath: /etc/headwater/keys
  readOnly: true
{{- end }}
{{- if .root.Values.nats.tlsSecretName }}
- name: nats-ca
  mountPath: /etc/headwater/nats-ca
  readOnly: true
{{- end }}
{{- end }}

{{/* Of the keys each pod gets those in `keys` only: its own kind's. */}}
{{- define "headwater.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  emptyDir: {}
{{- if .root.Values.nats.keysSecretName }}
- name: keys
  secret:
    secretName: {{ .root.Values.nats.keysSecretName }}
    defaultMode: 0440
    items:
{{- range .keys }}
      - {key: {{ . }}.nk, path: {{ . }}.nk}
{{- end }}
{{- end }}
{{- if .root.Values.nats.tlsSecretName }}
- name: nats-ca
  secret:
    secretName: {{ .root.Values.nats.tlsSecretName }}
    defaultMode: 0444
    items:
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- end }}

{{/* A process with a metrics port: alive while its event loop runs, ready when /health says so. */}}
{{- define "headwater.probes" -}}
startupProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 2
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
readinessProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
{{- end }}

{{- define "headwater.metricsPort" -}}
- name: metrics
  containerPort: 9090
{{- end }}

{{- define "headwater.metricsEnv" -}}
- name: HEADWATER_METRICS_HOST
  value: 0.0.0.0
- name: HEADWATER_METRICS_PORT
  value: "9090"
{{- end }}

{{/* At most one pod of a component is evicted at a time. */}}
{{- define "headwater.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{ include "headwater.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{ include "headwater.selector" . | nindent 6 }}
{{- end }}
