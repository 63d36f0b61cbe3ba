package mailapi

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/run"
)

// A resultServer serves what came out of runs. Who may see a run may see its results;
// files are served once they are released.
type resultServer struct {
	runs    *run.Service // nil: the server makes no runs
	exports *run.Exports
	prover  *run.Prover
}

func (s resultServer) routes() []route {
	return offeredIf(s.runs != nil && s.exports != nil && s.prover != nil, "results of runs", []route{
		{"GET", "/v1/runs/{id}/artifacts", 0, s.artifacts},
		{"GET", "/v1/runs/{id}/artifacts/{n}", 0, s.artifact},
		{"GET", "/v1/runs/{id}/report", 0, s.report},
		{"GET", "/v1/runs/{id}/statement", 0, s.statement},
	})
}

// find returns the run in the path, if the caller may see it.
func (s resultServer) find(r *http.Request, c caller) (run.Run, error) {
	return s.runs.Get(r.Context(), c.Principal, r.PathValue("id"))
}

func (s resultServer) artifacts(w http.ResponseWriter, r *http.Request, c caller) error {
	found, err := s.find(r, c)
	if err != nil {
		return err
	}
	out, err := s.exports.List(r.Context(), c.Principal, found.ID)
	if err != nil {
		return err
	}
	if c.Kind != auth.Person { // as elsewhere, who decided is for people
		for i := range out.Artifacts {
			out.Artifacts[i].Decider = ""
		}
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s resultServer) artifact(w http.ResponseWriter, r *http.Request, c caller) error {
	found, err := s.find(r, c)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(r.PathValue("n"))
	if err != nil || n < 1 {
		return fmt.Errorf("%w: n: must be the number of an artifact, from 1", errRequest)
	}
	a, data, err := s.exports.Open(r.Context(), c.Principal, found.ID, n)
	if err != nil {
		return err
	}
	door.Download(w, run.MediaType(a), a.Name)
	w.Header().Set("Repr-Digest", reprDigest(a))
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	return nil
}

// reprDigest returns the digest of an artifact as a header has it (RFC 9530).
func reprDigest(a api.RunArtifact) string {
	sum, err := hex.DecodeString(a.SHA256)
	if err != nil {
		return "" // unreachable: what was released has a digest
	}
	return "sha-256=:" + base64.StdEncoding.EncodeToString(sum) + ":"
}

func (s resultServer) report(w http.ResponseWriter, r *http.Request, c caller) error {
	found, err := s.find(r, c)
	if err != nil {
		return err
	}
	out, err := s.prover.Report(r.Context(), c.Principal, found.ID)
	if err != nil {
		return err
	}
	if c.Kind != auth.Person {
		for i := range out.Artifacts {
			out.Artifacts[i].Decider = ""
		}
		for i := range out.Decisions {
			out.Decisions[i].Decider, out.Decisions[i].Rule = "", ""
		}
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s resultServer) statement(w http.ResponseWriter, r *http.Request, c caller) error {
	found, err := s.find(r, c)
	if err != nil {
		return err
	}
	b, err := s.prover.Statement(r.Context(), c.Principal, found.ID)
	if err != nil {
		return err
	}
	door.Download(w, "application/vnd.dsse.envelope.v1+json", found.ID+".intoto.json")
	http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(b))
	return nil
}
