package mailapi

import (
	"encoding/json"
	"fmt"
	"net/http"
	"sync"

	"go.yaml.in/yaml/v3"

	"postern/docs"
	"postern/internal/api"
	"postern/internal/store"
)

// problemPath begins the type of every problem. It is a path of this server, so
// that who gets one can look up what it means.
const problemPath = "/v1/problems/"

// A documentServer serves the description of this API.
type documentServer struct{}

// documentRoutes are what this door says of itself, to anybody.
func (s documentServer) routes() []route {
	return []route{
		{"GET", "/v1/openapi.yaml", 0, s.getOpenAPI},
		{"GET", "/v1/openapi.json", 0, s.getOpenAPIJSON},
		{"GET", problemPath + "{code}", 0, s.getProblem},
	}
}

func (s documentServer) getOpenAPI(w http.ResponseWriter, _ *http.Request, _ caller) error {
	w.Header().Set("Content-Type", "application/yaml")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	_, err := w.Write(docs.OpenAPI)
	return err
}

// document is the description as JSON. It is made when it is first asked for.
var document = sync.OnceValues(func() (map[string]any, error) {
	var doc map[string]any
	if err := yaml.Unmarshal(docs.OpenAPI, &doc); err != nil {
		return nil, fmt.Errorf("read docs/openapi.yaml: %w", err)
	}
	// Through JSON once, so that it holds nothing but what JSON has.
	b, err := json.Marshal(doc)
	if err != nil {
		return nil, fmt.Errorf("read docs/openapi.yaml: %w", err)
	}
	var plain map[string]any
	err = json.Unmarshal(b, &plain)
	return plain, err
})

func (s documentServer) getOpenAPIJSON(w http.ResponseWriter, _ *http.Request, _ caller) error {
	doc, err := document()
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, doc)
	return nil
}

func (s documentServer) getProblem(w http.ResponseWriter, r *http.Request, _ caller) error {
	code := r.PathValue("code")
	k, ok := kinds[code]
	if !ok {
		return fmt.Errorf("problem: there is none of this name: %w", store.ErrNotFound)
	}
	answer(w, http.StatusOK, api.ProblemKind{Type: problemPath + code, Title: k.title, Status: k.status, Advice: k.advice})
	return nil
}
