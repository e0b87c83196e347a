{{- define "kvasir.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvasir.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "kvasir.labels" -}}
{{ include "kvasir.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvasir.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kvasir.name" .) }}
{{- end }}

{{- /* The settings, with the servers of this chart as replicas. */}}
{{- define "kvasir.config" -}}
{{ .Values.config }}
{{- if .Values.vllm.enabled }}
[[replicas]]
name = "vllm"
kind = "vllm"
url = "k8s://{{ .Release.Namespace }}/{{ include "kvasir.name" . }}-vllm:http"
{{- with .Values.vllm.servedName }}
model = "{{ . }} = {{ $.Values.vllm.model }}"
{{- end }}
{{- if .Values.vllm.apiKeySecret.name }}
api_key_env = "VLLM_API_KEY"
{{- end }}
{{- end }}
{{- end }}

{{- define "kvasir.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: { type: RuntimeDefault }
{{- end }}

{{- define "kvasir.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{- define "kvasir.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "kvasir.selector" . | nindent 6 }}
{{- end }}

{{- define "kvasir.vllmKey" -}}
{{- with .Values.vllm.apiKeySecret }}
{{- if .name }}
- name: VLLM_API_KEY
  valueFrom: { secretKeyRef: { name: {{ .name }}, key: {{ .key }} } }
{{- end }}
{{- end }}
{{- end }}

{{- /* What the gateways' port speaks. */}}
{{- define "kvasir.scheme" -}}
{{ if .Values.tls.existingSecret }}https{{ else }}http{{ end }}
{{- end }}
