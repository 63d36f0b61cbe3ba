package mailapi

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
)

// A permitServer serves the permits of a project.
type permitServer struct {
	gate    *oversight.Gate
	permits *permit.Register // nil: the server has none
}

func (s permitServer) routes() []route {
	return []route{
		{"GET", "/v1/permits", 0, s.list},
		{"GET", "/v1/permits/{id}", 0, s.get},
		{"DELETE", "/v1/permits/{id}", 0, s.end},
		{"POST", "/v1/actions/{id}/narrowing", maxBody, s.narrow},
	}
}

func (s permitServer) register() (*permit.Register, error) {
	if s.permits == nil {
		return nil, fmt.Errorf("permits: %w", errNotOffered)
	}
	return s.permits, nil
}

// permitOf returns p for the caller who. Code in a sandbox does not learn who decided.
func permitOf(who auth.Principal, p permit.Permit) api.Permit {
	out := api.Permit{
		ID: p.ID, Kind: string(p.Kind), Sandbox: p.Sandbox, Hosts: filled(p.Hosts), Methods: filled(p.Methods), Paths: filled(p.Paths), Port: int(p.Port), Secret: p.Secret, Why: p.Why,
		CreatedAt: p.Created, Until: p.Until, Action: p.Action, EndedAt: moment(p.Ended),
	}
	if who.Kind != auth.Sandbox {
		out.Decider, out.EndedBy = p.Decider, p.EndedBy
	}
	return out
}

// filled returns l, or an empty list for nil.
func filled(l []string) []string { return append([]string{}, l...) }

func (s permitServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	v := r.URL.Query()
	if err := onlyParameters(v, "sandbox", "kind", "all", "limit"); err != nil {
		return err
	}
	q := permit.Query{Sandbox: v.Get("sandbox"), Kind: permit.Kind(v.Get("kind"))}
	if q.Limit, err = limit(v, 100, 500); err != nil {
		return err
	}
	if q.Kind != "" && !slices.Contains(permit.Kinds(), q.Kind) {
		return fmt.Errorf("%w: kind: must be network, secret, connection or request", errRequest)
	}
	switch v.Get("all") {
	case "", "false":
	case "true":
		q.All = true
	default:
		return fmt.Errorf("%w: all: must be true or false", errRequest)
	}
	list, err := reg.List(r.Context(), c.Principal, q)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.PermitList{Permits: each(list, func(p permit.Permit) api.Permit { return permitOf(c.Principal, p) })})
	return nil
}

func (s permitServer) get(w http.ResponseWriter, r *http.Request, c caller) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	p, err := reg.Get(r.Context(), c.Principal, r.PathValue("id"))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, permitOf(c.Principal, p))
	return nil
}

func (s permitServer) end(w http.ResponseWriter, r *http.Request, c caller) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	if _, err := reg.End(r.Context(), c.Principal, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// narrow replaces a proposal that waits by one that asks for less.
func (s permitServer) narrow(w http.ResponseWriter, r *http.Request, c caller) error {
	reg, err := s.register()
	if err != nil {
		return err
	}
	var in api.NarrowedProposal
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Version <= 0 {
		return fmt.Errorf("%w: version: must be the action's, as it was shown", errRequest)
	}
	p := permit.Proposal{Hosts: in.Hosts, Methods: in.Methods, Paths: in.Paths, Scope: permit.Scope(in.Scope)}
	if in.Port < 0 || in.Port > 65535 {
		return fmt.Errorf("%w: port: must be 1 to 65535, or 0", errRequest)
	}
	p.Port = uint16(in.Port)
	if in.For != "" {
		if p.For, err = permit.ParseDuration(in.For); err != nil {
			return err
		}
	}
	a, err := reg.Narrow(r.Context(), c.Principal, r.PathValue("id"), in.Version, p)
	if err != nil {
		return err
	}
	out := actionOf(c, a)
	v, err := s.gate.Show(a)
	if err != nil {
		return err
	}
	if out.Review != nil {
		out.View = viewOf(v)
	}
	answer(w, http.StatusOK, out)
	return nil
}

// The limits of long polls for a proposal.
const (
	longestWait = 300 // seconds
	maxWaits    = 8   // long polls of one sandbox at a time
)

// askAt is where code in a sandbox proposes what it needs.
const askAt = "http://postern.internal/proposals"

// proposalOf returns a proposal as the sandbox that made it reads it.
func proposalOf(who auth.Principal, a oversight.Action, p *permit.Permit) (api.NetworkProposal, error) {
	asked, _, err := permit.Of(a)
	if err != nil {
		return api.NetworkProposal{}, err
	}
	seen := actionOf(caller{Principal: who}, a)
	out := api.NetworkProposal{
		ID: a.ID, State: seen.State, Hosts: asked.Hosts, Methods: filled(asked.Methods), Paths: filled(asked.Paths), Port: int(asked.Port), For: asked.For.String(), Scope: string(asked.Scope),
		Why: asked.Why, Narrowed: a.Author != "", CreatedAt: a.Created, DecidedAt: seen.DecidedAt, ExpiresAt: seen.ExpiresAt, Reason: seen.Reason,
	}
	if p != nil {
		out.Permit = new(permitOf(who, *p))
	}
	switch {
	case p != nil && p.Holds(time.Now()):
		out.Next = "Make the requests now; look the name up again first."
	case p != nil:
		out.Next = "The permit has ended. Propose again if it is still needed."
	case a.State == oversight.Pending || a.State == oversight.Scheduled || a.State == oversight.Approved || a.State == oversight.Executing:
		out.Next = "A person decides. Wait with GET " + askAt + "/" + a.ID + "?wait=60; do not propose it again."
	case a.State == oversight.Denied:
		out.Next = "It was denied. Do not propose it again; go on without it, or propose less."
	default:
		out.Next = "Nothing was allowed."
	}
	return out, nil
}

// proposal returns a with its permit, if it has one.
func (s *Server) proposal(r *http.Request, who auth.Principal, a oversight.Action) (api.NetworkProposal, error) {
	if a.State == oversight.Done {
		list, err := s.conf.Permits.List(r.Context(), who, permit.Query{Kind: permit.Network, All: true, Limit: 500})
		if err != nil {
			return api.NetworkProposal{}, err
		}
		for i := range list {
			if list[i].Action == a.ID {
				return proposalOf(who, a, &list[i])
			}
		}
	}
	return proposalOf(who, a, nil)
}

// InnerPaths are the paths of [Server.Inner].
var InnerPaths = []string{"/proposals", "/proposals/{id}", "/permits", "/denials"}

// Inner returns what the sandbox who finds at http://postern.internal about its
// network: what was refused, what it proposes, and what it is permitted. It needs no
// key: the link says who it is.
func (s *Server) Inner(who auth.Principal) http.Handler {
	mux := http.NewServeMux()
	serve := func(pattern string, body int64, h func(w http.ResponseWriter, r *http.Request) error) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			r.Body = http.MaxBytesReader(w, r.Body, body)
			w.Header().Set("Cache-Control", "no-store")
			err := fmt.Errorf("permits: %w", errNotOffered)
			if who.Kind == auth.Sandbox && s.conf.Permits != nil {
				err = h(w, r)
			}
			if err != nil {
				s.fail(w, r, err)
			}
		})
	}
	const maxProposal = 16 << 10
	serve("POST /proposals", maxProposal, func(w http.ResponseWriter, r *http.Request) error { return s.propose(w, r, who) })
	serve("GET /proposals", 0, func(w http.ResponseWriter, r *http.Request) error { return s.listProposals(w, r, who) })
	serve("GET /proposals/{id}", 0, func(w http.ResponseWriter, r *http.Request) error { return s.getProposal(w, r, who) })
	serve("GET /permits", 0, func(w http.ResponseWriter, r *http.Request) error {
		return permitServer{s.gate, s.conf.Permits}.list(w, r, caller{Principal: who})
	})
	serve("GET /denials", 0, func(w http.ResponseWriter, r *http.Request) error { return s.listDenials(w, r, who) })
	for _, p := range InnerPaths {
		serve(p, 0, func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Allow", "GET")
			if p == "/proposals" {
				w.Header().Set("Allow", "GET, POST")
			}
			return door.ErrMethod
		})
	}
	// The attack: a web page in a browser inside, which proposes in the agent's name.
	return door.SameOrigin(mux, s.fail)
}

func (s *Server) propose(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var p permit.Proposal
	if err := door.Decode(r, &p); err != nil {
		return err
	}
	a, err := s.conf.Permits.Propose(r.Context(), who, "proposal", p)
	if err != nil {
		return err
	}
	out, err := s.proposal(r, who, a)
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/proposals/"+a.ID)
	answer(w, http.StatusAccepted, out)
	return nil
}

func (s *Server) listProposals(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if err := onlyParameters(r.URL.Query()); err != nil {
		return err
	}
	list, err := s.gate.Actions(r.Context(), who, oversight.Query{Limit: 200})
	if err != nil {
		return err
	}
	out := api.NetworkProposalList{Proposals: []api.NetworkProposal{}}
	for _, a := range list {
		if a.Kind != policy.KindPermit || a.Proposer != who.String() || len(out.Proposals) == 50 {
			continue
		}
		if a, err = s.gate.Action(r.Context(), who, a.ID); err != nil {
			return err
		}
		if !a.Dropped.IsZero() {
			continue
		}
		p, err := s.proposal(r, who, a)
		if err != nil {
			return err
		}
		out.Proposals = append(out.Proposals, p)
	}
	answer(w, http.StatusOK, out)
	return nil
}

func (s *Server) getProposal(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q := r.URL.Query()
	if err := onlyParameters(q, "wait"); err != nil {
		return err
	}
	var wait time.Duration
	if q.Has("wait") {
		n, err := pollTime(q.Get("wait"))
		if err != nil {
			return err
		}
		wait = n
		leave, err := s.crowd.enter("proposals of "+who.ID, maxWaits)
		if err != nil {
			return err
		}
		defer leave()
	}
	a, err := s.conf.Permits.Wait(r.Context(), who, r.PathValue("id"), wait, s.closing)
	if err != nil {
		return err
	}
	out, err := s.proposal(r, who, a)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, out)
	return nil
}

// pollTime parses the time of a long poll.
func pollTime(v string) (time.Duration, error) {
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > longestWait {
		return 0, fmt.Errorf("%w: wait: must be 1 to %d seconds", errRequest, longestWait)
	}
	return time.Duration(n) * time.Second, nil
}

func (s *Server) listDenials(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	q := r.URL.Query()
	if err := onlyParameters(q, "since"); err != nil {
		return err
	}
	var since time.Time
	if v := q.Get("since"); v != "" {
		var err error
		if since, err = time.Parse(time.RFC3339, v); err != nil {
			return fmt.Errorf("%w: since: must be a time such as 2027-01-31T12:00:00Z", errRequest)
		}
	}
	out := api.DenialList{Denials: []api.Denial{}, Ask: askAt}
	if s.conf.Denials != nil {
		for _, d := range s.conf.Denials(who.ID) {
			if d.Time.After(since) {
				out.Denials = append(out.Denials, d)
			}
		}
	}
	answer(w, http.StatusOK, out)
	return nil
}
