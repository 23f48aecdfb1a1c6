{{- define "vllm-blend.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 52 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "vllm-blend.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "vllm-blend.labels" -}}
{{ include "vllm-blend.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "vllm-blend.secret" -}}
{{- if and .Values.apiKeys.text .Values.apiKeys.existingSecret }}
{{- fail "apiKeys.text and apiKeys.existingSecret are both given: leave one of them empty" }}
{{- end }}
{{- if .Values.apiKeys.text }}{{ include "vllm-blend.name" . }}-keys{{ else }}{{ .Values.apiKeys.existingSecret }}{{ end }}
{{- end }}

{{- /* A volume: the claim that is named, else the chart's own, else one that goes with the pod. */ -}}
{{- define "vllm-blend.volume" -}}
{{- if .values.existingClaim }}
persistentVolumeClaim:
  claimName: {{ .values.existingClaim }}
{{- else if .values.size }}
persistentVolumeClaim:
  claimName: {{ .claim }}
{{- else }}
emptyDir: {}
{{- end }}
{{- end }}
