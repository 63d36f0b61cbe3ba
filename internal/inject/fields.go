package inject

import (
	"net/http"
	"slices"
	"strings"
)

// authorization is the field that may have a value unless its secret lists others.
const authorization = "Authorization"

// A knownField is the header field in which the servers of some hosts expect a
// credential, beside Authorization.
type knownField struct {
	host  string // a name, or *. and a name
	field string // canonical
}

// knownFields returns what is known of hosts, from the documentation of their APIs.
// A field stands here only if a server reads nothing but a credential from it: what a
// model reads, or what an API stores and shows, must never be here.
func knownFields() []knownField {
	return []knownField{
		{"api.anthropic.com", "X-Api-Key"},
		{"*.googleapis.com", "X-Goog-Api-Key"},
		{"*.openai.azure.com", "Api-Key"},
		{"*.cognitiveservices.azure.com", "Api-Key"},
		{"*.cognitiveservices.azure.com", "Ocp-Apim-Subscription-Key"},
		{"*.services.ai.azure.com", "Api-Key"},
		{"api.cognitive.microsoft.com", "Ocp-Apim-Subscription-Key"},
		{"api.bing.microsoft.com", "Ocp-Apim-Subscription-Key"},
		{"api.elevenlabs.io", "Xi-Api-Key"},
		{"api.search.brave.com", "X-Subscription-Token"},
		{"api.exa.ai", "X-Api-Key"},
		{"google.serper.dev", "X-Api-Key"},
		{"api.pinecone.io", "Api-Key"},
		{"*.pinecone.io", "Api-Key"},
		{"*.qdrant.io", "Api-Key"},
		{"gitlab.com", "Private-Token"},
		{"gitlab.com", "Job-Token"},
		{"api.cloudflare.com", "X-Auth-Key"},
		{"api.fastly.com", "Fastly-Key"},
		{"api.datadoghq.com", "Dd-Api-Key"},
		{"api.datadoghq.com", "Dd-Application-Key"},
		{"api.newrelic.com", "Api-Key"},
		{"api.honeycomb.io", "X-Honeycomb-Team"},
		{"api.postmarkapp.com", "X-Postmark-Server-Token"},
		{"api.brevo.com", "Api-Key"},
		{"api.hunter.io", "X-Api-Key"},
	}
}

// Fields returns the header fields that may have the value of a secret which lists
// none: Authorization, and the fields that its hosts are known to use. Hosts are as
// in [Secret.Hosts].
func Fields(hosts ...string) []string {
	out := []string{authorization}
	for _, k := range knownFields() {
		if slices.ContainsFunc(hosts, func(h string) bool { return h == k.host || matches(k.host, h) }) && !slices.Contains(out, k.field) {
			out = append(out, k.field)
		}
	}
	return out
}

// enters reports whether the value of s may stand in a header field of a request to
// host.
func (s *Secret) enters(host, field string) bool {
	field = http.CanonicalHeaderKey(field)
	if len(s.Headers) > 0 {
		return slices.Contains(s.Headers, field)
	}
	return slices.Contains(s.RuleHeaders, field) || slices.Contains(Fields(host), field)
}

// credential reports whether a header field of a request to host is one in which
// some secret's value could stand, here or at the secret's own hosts. A sentinel in
// it is meant as a credential: if it is of no use there, the request is refused.
func credential(secrets []Secret, host, field string) bool {
	field = http.CanonicalHeaderKey(field)
	if field == "Proxy-Authorization" || slices.Contains(Fields(host), field) {
		return true
	}
	return slices.ContainsFunc(secrets, func(s Secret) bool {
		if len(s.Headers) > 0 {
			return slices.Contains(s.Headers, field)
		}
		return slices.Contains(s.RuleHeaders, field) || slices.Contains(Fields(s.Hosts...), field)
	})
}

// credentialWords are the words of the names of fields, cookies and parameters that
// carry credentials.
func credentialWords() []string {
	return []string{"auth", "authorization", "authentication", "token", "jwt", "bearer", "key", "apikey", "appkey", "secret", "password", "passwd", "pwd", "credential", "credentials", "signature", "sig", "cookie", "assertion"}
}

// harmlessNames are names with such a word that carry no credential, in lower case.
func harmlessNames() []string {
	return []string{"idempotency-key", "x-idempotency-key", "sec-websocket-key", "surrogate-key", "cache-key", "x-cache-key", "max_tokens", "www-authenticate"}
}

// IsCredential reports whether the name of a header field or a query parameter says
// that it carries a credential.
func IsCredential(name string) bool {
	low := strings.ToLower(name)
	if slices.Contains(harmlessNames(), low) {
		return false
	}
	words := strings.FieldsFunc(low, func(c rune) bool { return c == '-' || c == '_' || c == '.' || c == '[' || c == ']' || c == '$' })
	// AccessToken and apiKey in one word.
	return slices.ContainsFunc(words, func(w string) bool {
		return slices.ContainsFunc(credentialWords(), func(c string) bool {
			return w == c || len(c) > 3 && strings.HasSuffix(w, c) || strings.HasSuffix(w, "apikey")
		})
	}) || strings.HasSuffix(name, "Key")
}
