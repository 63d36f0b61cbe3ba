package mailapi

import (
	"fmt"
	"net/http"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/policy"
	"postern/internal/seal"
)

// A connectServer serves connect codes, with which agents connect themselves.
type connectServer struct {
	post   *mailbox.PostOffice
	tries  *signupLimiter
	conf   *Config
	prompt func(code string) string // nil: the answers have none
}

func (s connectServer) routes() []route {
	return []route{
		{"GET", "/v1/connect-codes", 0, s.list},
		{"POST", "/v1/connect-codes", maxBody, s.create},
		{"DELETE", "/v1/connect-codes/{id}", 0, s.withdraw},
	}
}

// The code is the only credential of who uses it.
func (s connectServer) openRoutes() []route {
	return []route{
		{"POST", "/v1/connect", 4 << 10, s.connect},
	}
}

func connectCodeOf(c mailbox.ConnectCode) api.ConnectCode {
	state := api.ConnectOpen
	switch {
	case !c.Used.IsZero():
		state = api.ConnectUsed
	case !c.Withdrawn.IsZero():
		state = api.ConnectWithdrawn
	case !c.Expires.After(time.Now()):
		state = api.ConnectExpired
	}
	return api.ConnectCode{
		ID: c.ID, Address: c.Address, DisplayName: c.DisplayName, Mode: api.Mode(c.Mode), Scopes: scopesOf(c.Scope), State: state,
		CreatedAt: c.Created, CreatedBy: c.CreatedBy, ExpiresAt: c.Expires, UsedAt: moment(c.Used), Inbox: c.Inbox, TriedAgainAt: moment(c.Again),
	}
}

func (s connectServer) list(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.ConnectCodes(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.ConnectCodeList{Codes: each(list, connectCodeOf)})
	return nil
}

func (s connectServer) create(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewConnectCode
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	n := mailbox.NewConnectCode{Address: in.Address, DisplayName: in.DisplayName, Mode: policy.Mode(in.Mode)}
	if len(in.Scopes) > 0 {
		if n.Scope = seal.Join(each(in.Scopes, func(s api.Scope) seal.Scope { return seal.Scope(s) })...); n.Scope == "" {
			return fmt.Errorf("%w: scopes: must be some of %v", directory.ErrInvalid, seal.Scopes)
		}
	}
	if in.ExpiresAt != nil {
		n.Expires = *in.ExpiresAt
	}
	made, code, err := s.post.NewConnectCode(r.Context(), c.Principal, n)
	if err != nil {
		return err
	}
	out := connectCodeOf(made)
	out.Code = code.Reveal()
	if s.prompt != nil {
		out.Prompt = s.prompt(out.Code)
	}
	answer(w, http.StatusCreated, out)
	return nil
}

func (s connectServer) withdraw(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.post.WithdrawConnectCode(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

const connectNotice = "Keep the key in a file that only you read: it is shown this once, and the code works no more. Do not print it and do not send it to anybody. " +
	"GET /v1/me with the header Authorization: Bearer says what it may do; /llms.txt says how to go on."

// connect makes the inbox of a code for the client that presents it. Codes that are wrong cost their
// address a try, as sign-ups do; a code that is right costs none.
func (s connectServer) connect(w http.ResponseWriter, r *http.Request, _ caller) error {
	addr := clientOf(r, s.conf.Proxies)
	// A bucket for all addresses would let anybody keep everybody from connecting, and a
	// code of 128 random bits needs none.
	if err := s.tries.takeOf(addr, time.Now()); err != nil {
		return err
	}
	var in api.Connect
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	b, scope, key, err := s.post.Redeem(r.Context(), auth.Secret(in.Code))
	if err != nil {
		return err
	}
	s.tries.giveBack(addr)
	answer(w, http.StatusCreated, api.Connected{
		ID: b.ID, Address: b.Address, DisplayName: b.DisplayName, Mode: api.Mode(b.Mode), Scopes: scopesOf(scope), Key: key.Reveal(), Notice: connectNotice,
	})
	return nil
}
