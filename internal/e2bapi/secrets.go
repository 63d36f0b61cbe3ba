package e2bapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/secret"
)

// The keys of a secret's metadata that are fields of Postern's own. E2B's clients
// send no unknown fields. In an update a key that is left out leaves its field.
const (
	hostsMetadata    = "postern.hosts"    // hosts and *.hosts between commas
	envMetadata      = "postern.env"      // environment variable
	approvalMetadata = "postern.approval" // always, first, never
	kindMetadata     = "postern.kind"     // value, aws; only at create
	headersMetadata  = "postern.headers"  // header fields that may have the value, between commas
	placesMetadata   = "postern.places"   // other places, each as "SPOT METHOD HOST/PATH", between semicolons
	ownMetadata      = "postern."
)

// secretRoutes adds the routes for secrets.
func (s *Server) secretRoutes(handle func(string, func(http.ResponseWriter, *http.Request, auth.Principal) error)) {
	handle("POST /secrets", s.createSecret)
	handle("GET /secrets", s.listSecrets)
	handle("GET /secrets/{id}", s.getSecret)
	handle("POST /secrets/{id}", s.updateSecret)
	handle("DELETE /secrets/{id}", s.deleteSecret)
}

// errNoSecrets means that the server has no secrets.
var errNoSecrets = fmt.Errorf("secrets: %w", errNotYet)

func (s *Server) secrets() (*secret.Store, error) {
	if s.conf.Secrets == nil {
		return nil, errNoSecrets
	}
	return s.conf.Secrets, nil
}

// secretStatus returns the status of an error of secrets, or 0 for other errors.
func secretStatus(err error) int {
	for _, c := range []struct {
		err    error
		status int
	}{
		{secret.ErrInvalid, http.StatusBadRequest},
		{secret.ErrNotFound, http.StatusNotFound},
		{secret.ErrExists, http.StatusConflict},
		{secret.ErrForged, http.StatusConflict},
		{secret.ErrTooMany, http.StatusForbidden},
	} {
		if errors.Is(err, c.err) {
			return c.status
		}
	}
	return 0
}

// attachSecrets checks the secrets that a sandbox asks for, and adds their names to
// e.
func (s *Server) attachSecrets(ctx context.Context, who auth.Principal, env, metadata map[string]string, e *policy.Egress) error {
	if s.conf.Secrets == nil {
		if len(e.RuleSecrets()) > 0 || metadata[secret.Metadata] != "" {
			return errNoSecrets
		}
		return nil
	}
	return s.conf.Secrets.Attach(ctx, who, env, metadata, e)
}

// secretFields returns the change that metadata asks for, and its kind.
func secretFields(metadata map[string]string) (c secret.Change, kind secret.Kind, err error) {
	if metadata == nil {
		return c, "", nil
	}
	c.Metadata = map[string]string{}
	for _, key := range slices.Sorted(maps.Keys(metadata)) {
		value := metadata[key]
		switch key {
		case hostsMetadata:
			hosts := strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' })
			c.Hosts = &hosts
		case envMetadata:
			c.Env = &value
		case approvalMetadata:
			c.Approval = new(secret.Approval(value))
		case kindMetadata:
			kind = secret.Kind(value)
		case headersMetadata:
			headers := strings.FieldsFunc(value, func(r rune) bool { return r == ',' || r == ' ' })
			c.Headers = &headers
		case placesMetadata:
			places := []inject.Place{}
			for text := range strings.SplitSeq(value, ";") {
				if strings.TrimSpace(text) == "" {
					continue
				}
				p, err := secret.ParsePlace(text)
				if err != nil {
					return c, "", fmt.Errorf("metadata[%q]: %w", key, err)
				}
				places = append(places, p)
			}
			c.Places = &places
		default:
			if strings.HasPrefix(key, ownMetadata) {
				return c, "", fmt.Errorf("%w: metadata[%q]: want %s, %s, %s, %s, %s or %s", errRequest, key, hostsMetadata, envMetadata, approvalMetadata, kindMetadata, headersMetadata, placesMetadata)
			}
			c.Metadata[key] = value
		}
	}
	return c, kind, nil
}

// secretValue returns the value in a request for a kind of secret. For an AWS pair
// it is a JSON object, with the names of the AWS command line or of Postern's API.
// Errors have no part of it.
func secretValue(kind secret.Kind, value auth.Secret) (secret.Value, error) {
	if kind != secret.AWS {
		return secret.Value{Text: value}, nil
	}
	var pair struct {
		AccessKeyID      string      `json:"access_key_id"`
		SecretAccessKey  auth.Secret `json:"secret_access_key"`
		SessionToken     auth.Secret `json:"session_token"`
		AccessKeyID2     string      `json:"AccessKeyId"`
		SecretAccessKey2 auth.Secret `json:"SecretAccessKey"`
		SessionToken2    auth.Secret `json:"SessionToken"`
	}
	if err := json.Unmarshal([]byte(value.Reveal()), &pair); err != nil {
		return secret.Value{}, fmt.Errorf(`%w: value: want JSON {"access_key_id": "…", "secret_access_key": "…", "session_token": "…"} for a secret of kind aws`, errRequest)
	}
	v := secret.Value{Text: pair.SecretAccessKey, AccessKey: pair.AccessKeyID, SessionToken: pair.SessionToken}
	if v.AccessKey == "" {
		v = secret.Value{Text: pair.SecretAccessKey2, AccessKey: pair.AccessKeyID2, SessionToken: pair.SessionToken2}
	}
	return v, nil
}

// secretInfo returns a secret in E2B's form. Postern's own fields are metadata, where
// they are not the defaults.
func secretInfo(c secret.Secret) map[string]any {
	metadata := maps.Clone(c.Metadata)
	if len(c.Hosts) > 0 {
		metadata[hostsMetadata] = strings.Join(c.Hosts, ",")
	}
	if c.Env != secret.EnvOf(c.Name) {
		metadata[envMetadata] = c.Env
	}
	if c.Approval != secret.Never {
		metadata[approvalMetadata] = string(c.Approval)
	}
	if len(c.Headers) > 0 {
		metadata[headersMetadata] = strings.Join(c.Headers, ",")
	}
	if len(c.Places) > 0 {
		texts := make([]string, len(c.Places))
		for i, p := range c.Places {
			texts[i] = p.String()
		}
		metadata[placesMetadata] = strings.Join(texts, "; ")
	}
	if c.Kind != secret.Plain {
		metadata[kindMetadata] = string(c.Kind)
	}
	return map[string]any{
		"secretID": c.ID, "name": c.Name, "currentVersion": c.Version, "metadata": metadata,
		"createdAt": c.Created.Format(time.RFC3339Nano), "updatedAt": c.Updated.Format(time.RFC3339Nano),
	}
}

func (s *Server) createSecret(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Name     string            `json:"name"`
		Value    auth.Secret       `json:"value"`
		Metadata map[string]string `json:"metadata"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	ss, err := s.secrets()
	if err != nil {
		return err
	}
	ch, kind, err := secretFields(b.Metadata)
	if err != nil {
		return err
	}
	v, err := secretValue(kind, b.Value)
	if err != nil {
		return err
	}
	set := secret.Settings{Metadata: ch.Metadata}
	if ch.Hosts != nil {
		set.Hosts = *ch.Hosts
	}
	if ch.Env != nil {
		set.Env = *ch.Env
	}
	if ch.Approval != nil {
		set.Approval = *ch.Approval
	}
	if ch.Headers != nil {
		set.Headers = *ch.Headers
	}
	if ch.Places != nil {
		set.Places = *ch.Places
	}
	c, err := ss.Create(r.Context(), who, b.Name, kind, v, set)
	if err != nil {
		return err
	}
	reply(w, http.StatusCreated, secretInfo(c))
	return nil
}

// listSecrets answers with the secrets of the caller's project, newest first.
func (s *Server) listSecrets(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	p, err := pageOf(r.URL.Query())
	if err != nil {
		return err
	}
	ss, err := s.secrets()
	if err != nil {
		return err
	}
	all, err := ss.List(r.Context(), who)
	if err != nil {
		return err
	}
	at := func(c secret.Secret) string { return cursor(c.Created, c.ID) }
	slices.SortFunc(all, func(a, b secret.Secret) int { return strings.Compare(at(b), at(a)) })
	out := []map[string]any{}
	last := ""
	for _, c := range all {
		if p.after != "" && at(c) >= p.after {
			continue
		}
		if len(out) == p.limit {
			setNextToken(w, last)
			break
		}
		out, last = append(out, secretInfo(c)), at(c)
	}
	reply(w, http.StatusOK, out)
	return nil
}

func (s *Server) getSecret(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ss, err := s.secrets()
	if err != nil {
		return err
	}
	c, err := ss.Get(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, secretInfo(c))
	return nil
}

// updateSecret replaces a value. Metadata that is left out stays.
func (s *Server) updateSecret(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	var b struct {
		Value    *auth.Secret      `json:"value"`
		Metadata map[string]string `json:"metadata"`
	}
	if err := decode(r, &b); err != nil {
		return err
	}
	if b.Value == nil {
		return fmt.Errorf("%w: value: is missing", errRequest)
	}
	ss, err := s.secrets()
	if err != nil {
		return err
	}
	was, err := ss.Get(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return err
	}
	ch, kind, err := secretFields(b.Metadata)
	if err != nil {
		return err
	}
	if kind != "" && kind != was.Kind {
		return fmt.Errorf("%w: metadata[%q]: a secret keeps its kind, which is %s", errRequest, kindMetadata, was.Kind)
	}
	v, err := secretValue(was.Kind, *b.Value)
	if err != nil {
		return err
	}
	ch.Value = &v
	c, err := ss.Update(r.Context(), who, was.ID, ch)
	if err != nil {
		return err
	}
	reply(w, http.StatusOK, secretInfo(c))
	return nil
}

func (s *Server) deleteSecret(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	ss, err := s.secrets()
	if err != nil {
		return err
	}
	if err := ss.Delete(r.Context(), who, r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
