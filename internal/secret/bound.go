package secret

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/contract"
	"postern/internal/inject"
	"postern/internal/policy"
	"postern/internal/store"
)

// Metadata is the key of a sandbox's metadata that attaches secrets to it: their
// names between commas. Each becomes an environment variable, see [Secret.Env].
const Metadata = "postern.secrets"

// maxAttached bounds the secrets of a sandbox: every request is searched for all.
const maxAttached = 64

// names returns the names of the secrets of a sandbox: attached, or in its rules.
func names(e *policy.Egress) []string {
	all := slices.AppendSeq(slices.Clone(e.Secrets), maps.Keys(e.RuleSecrets()))
	slices.Sort(all)
	return slices.Compact(all)
}

// byName returns those of the named secrets that the project has and that are
// genuine.
func (s *Store) byName(ctx context.Context, project string, names []string) (map[string]Secret, error) {
	if len(names) == 0 {
		return nil, nil
	}
	args := []any{project}
	for _, n := range names {
		args = append(args, n)
	}
	out := map[string]Secret{}
	err := s.db.View(ctx, func(tx *store.Tx) error {
		rows, err := s.rows(ctx, tx, `project_id = $1 and name in (`+store.Places(2, len(names))+`)`, args...)
		for _, c := range rows {
			if c.revision == forged {
				s.log.ErrorContext(ctx, "the row of a secret was changed in the database behind the server's back; it is not used", "secret", c.ID)
				continue
			}
			out[c.Name] = c
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read secrets of project %s: %w", project, err)
	}
	return out, nil
}

// Bound returns the secrets of the sandbox who with its sentinels and hosts, without
// values: those that e attaches or names in rules. A secret that does not exist any
// more, or whose row was changed in the database, is left out.
//
// A secret with hosts belongs to these, also where a rule names another. One without
// belongs to the hosts of the rules that name it. In a sandbox that a contract binds it
// belongs to no other hosts than those of the contract, and people are asked at least as
// often as the contract says.
func (s *Store) Bound(ctx context.Context, who auth.Principal, e *policy.Egress) ([]inject.Secret, error) {
	found, err := s.byName(ctx, who.Project, names(e))
	if err != nil {
		return nil, err
	}
	rules := e.RuleSecrets()
	var out []inject.Secret
	for _, name := range slices.Sorted(maps.Keys(found)) {
		c := found[name]
		b := inject.Secret{ID: c.ID, Name: c.Name, Sentinel: s.Sentinel(c.Project, who.ID, c.ID), Hosts: c.Hosts, RuleHosts: rules[name], Headers: c.Headers, Places: c.Places, Kind: string(c.Kind), Approval: string(c.Approval)}
		if c.Kind == AWS {
			b.AccessKey = s.AccessKeySentinel(c.Project, who.ID, c.ID)
		}
		if who.Contract != "" {
			// The attack: a secret gets further hosts, or is used without asking, after the
			// contract of a sandbox that has it was approved.
			cred, err := s.conf.Bounds.Credential(ctx, who.Project, who.Contract, name)
			if err != nil {
				return nil, err
			}
			if b.Hosts, b.Approval = cred.Hosts, string(stricter(c.Approval, Approval(cred.Approval))); len(c.Hosts) > 0 {
				b.Hosts = contract.Narrow(c.Hosts, cred.Hosts)
			}
			b.Places = nil         // a place that was opened later is wider than the contract
			if len(b.Hosts) == 0 { // without hosts it would belong to those of the rules
				continue
			}
		}
		out = append(out, b)
	}
	return out, nil
}

// Open returns the value of a secret for the sandbox who, and records when it was
// used. The caller has checked that the sandbox may use it, and wipes the value.
func (s *Store) Open(ctx context.Context, who auth.Principal, id string) (inject.Value, error) {
	if who.Kind != auth.Sandbox || who.Project == "" {
		return inject.Value{}, fmt.Errorf("open secret: only for a sandbox: %w", auth.ErrForbidden)
	}
	var c Secret
	var used time.Time
	err := s.db.View(ctx, func(tx *store.Tx) (err error) {
		// By the ID alone, within the sandbox's own project.
		rows, err := s.rows(ctx, tx, `project_id = $1 and id = $2`, who.Project, id)
		if err != nil {
			return err
		}
		if len(rows) == 0 {
			return ErrNotFound
		}
		if c = rows[0]; c.revision == forged {
			return ErrForged
		}
		used, err = lastUsed(ctx, tx, id)
		return err
	})
	if err != nil {
		return inject.Value{}, fmt.Errorf("open secret %s: %w", id, err)
	}
	text, accessKey, token, err := s.open(c)
	if err != nil {
		return inject.Value{}, err
	}
	if now := time.Now(); now.Sub(used) > UseResolution {
		err := s.db.Update(ctx, func(tx *store.Tx) error {
			_, err := tx.ExecContext(ctx, `update secret set last_used_at = $1 where id = $2 and last_used_at < $1`, store.Time(now), id)
			return err
		})
		if err != nil {
			s.log.WarnContext(ctx, "record the use of a secret", "secret", id, "err", err)
		}
	}
	return inject.Value{Value: text, AccessKey: string(accessKey), SessionToken: token}, nil
}

// Attach checks the secrets that a new sandbox of who's project asks for, and adds
// their names to e: those in placeholders ${e2b.secrets.NAME} of env, those in
// metadata under [Metadata]. It checks those in the rules of e too. Names that e has
// already stay, also of secrets that are gone. It changes no variable:
// the sandbox has no ID yet, see [Store.Environment]. Errors wrap [ErrInvalid] and
// name the field.
func (s *Store) Attach(ctx context.Context, who auth.Principal, env, metadata map[string]string, e *policy.Egress) error {
	type want struct{ field, name string }
	var wants []want
	for _, key := range slices.Sorted(maps.Keys(env)) {
		field := fmt.Sprintf("envVars[%q]", key)
		parts, err := policy.ParseTemplate(env[key])
		if err != nil {
			return fmt.Errorf("%w: %s: %w", ErrInvalid, field, err)
		}
		for _, p := range parts {
			if p.Token != "" {
				return fmt.Errorf("%w: %s: an identity token can stand in headers of network.rules only", ErrInvalid, field)
			}
			if p.Secret != "" {
				wants = append(wants, want{field, p.Secret})
			}
		}
	}
	for _, name := range listed(metadata[Metadata]) {
		wants = append(wants, want{fmt.Sprintf("metadata[%q]", Metadata), name})
	}
	rules := e.RuleSecrets()
	for _, name := range slices.Sorted(maps.Keys(rules)) {
		wants = append(wants, want{"network.rules", name})
	}
	if len(wants) == 0 {
		return nil
	}
	all := make([]string, len(wants))
	for i, w := range wants {
		all[i] = w.name
	}
	slices.Sort(all)
	if all = slices.Compact(all); len(all) > maxAttached {
		return fmt.Errorf("%w: %d secrets; a sandbox can have %d", ErrInvalid, len(all), maxAttached)
	}
	found, err := s.byName(ctx, who.Project, all)
	if err != nil {
		return err
	}
	for _, w := range wants {
		c, ok := found[w.name]
		if !ok {
			return fmt.Errorf("%w: %s: the project has no secret %.100q", ErrInvalid, w.field, w.name)
		}
		if w.field == "network.rules" {
			if err := c.takes(e); err != nil {
				return err
			}
			if i := slices.IndexFunc(rules[w.name], func(h string) bool { return len(c.Hosts) > 0 && widened(c.Hosts, []string{h}) }); i >= 0 {
				return fmt.Errorf("%w: network.rules[%q]: the secret %q belongs to %s only", ErrInvalid, rules[w.name][i], c.Name, strings.Join(c.Hosts, ", "))
			}
			continue
		}
		if len(c.Hosts) == 0 && len(rules[w.name]) == 0 {
			return fmt.Errorf("%w: %s: the secret %q belongs to no host: give it hosts, or a rule of network.rules that uses it", ErrInvalid, w.field, c.Name)
		}
		if !slices.Contains(e.Secrets, c.Name) {
			e.Secrets = append(slices.Clone(e.Secrets), c.Name)
		}
	}
	slices.Sort(e.Secrets)
	return nil
}

// takes returns an error if a rule of e puts c into a header field that c does not list.
// The attack: a project's key has the value put where its host shows it.
func (c *Secret) takes(e *policy.Egress) error {
	if len(c.Headers) == 0 {
		return nil // whoever writes a rule says which field the host reads
	}
	for _, host := range slices.Sorted(maps.Keys(e.Rules)) {
		for _, r := range e.Rules[host] {
			for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
				parts, _ := policy.ParseTemplate(r.Headers[name]) // validated
				if slices.ContainsFunc(parts, func(p policy.Part) bool { return p.Secret == c.Name }) && !slices.Contains(c.Headers, name) {
					return fmt.Errorf("%w: network.rules[%q]: the secret %q goes into %s only, and not into %s", ErrInvalid, host, c.Name, strings.Join(c.Headers, ", "), name)
				}
			}
		}
	}
	return nil
}

// listed returns the names in a list between commas, in lower case.
func listed(s string) (out []string) {
	for name := range strings.SplitSeq(s, ",") {
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			out = append(out, name)
		}
	}
	return out
}

// Environment returns env as the sandbox gets it: placeholders are replaced by its
// sentinels, and each secret in metadata under [Metadata] is a variable. A variable
// in env wins over one of a secret. [Store.Attach] has checked the names; a secret
// that was deleted since is an error.
func (s *Store) Environment(ctx context.Context, sandbox auth.Principal, e *policy.Egress, env, metadata map[string]string) (map[string]string, error) {
	if len(e.Secrets) == 0 {
		return env, nil
	}
	found, err := s.byName(ctx, sandbox.Project, e.Secrets)
	if err != nil {
		return nil, err
	}
	out := map[string]string{}
	for _, name := range listed(metadata[Metadata]) {
		c, ok := found[name]
		switch {
		case !ok:
			return nil, fmt.Errorf("%w: metadata[%q]: the project has no secret %.100q any more", ErrInvalid, Metadata, name)
		case c.Kind == AWS:
			out["AWS_ACCESS_KEY_ID"] = s.AccessKeySentinel(c.Project, sandbox.ID, c.ID)
			out["AWS_SECRET_ACCESS_KEY"] = s.Sentinel(c.Project, sandbox.ID, c.ID)
		default:
			out[c.Env] = s.Sentinel(c.Project, sandbox.ID, c.ID)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(env)) {
		value := env[key]
		parts, err := policy.ParseTemplate(value)
		if err != nil {
			return nil, fmt.Errorf("%w: envVars[%q]: %w", ErrInvalid, key, err)
		}
		var b strings.Builder
		for _, p := range parts {
			if p.Secret == "" {
				b.WriteString(p.Text)
				continue
			}
			c, ok := found[p.Secret]
			if !ok {
				return nil, fmt.Errorf("%w: envVars[%q]: the project has no secret %.100q any more", ErrInvalid, key, p.Secret)
			}
			b.WriteString(s.Sentinel(c.Project, sandbox.ID, c.ID))
		}
		out[key] = b.String()
	}
	return out, nil
}

// Renew returns env, which the sandbox from has, with the sentinels of another
// sandbox that was forked from it. A program that runs on in the copy still has those
// of from in its memory, and they stand for nothing there.
func (s *Store) Renew(ctx context.Context, sandbox auth.Principal, from string, e *policy.Egress, env map[string]string) (map[string]string, error) {
	found, err := s.byName(ctx, sandbox.Project, e.Secrets)
	if err != nil {
		return nil, err
	}
	var pairs []string
	for _, c := range found {
		pairs = append(pairs, s.Sentinel(c.Project, from, c.ID), s.Sentinel(c.Project, sandbox.ID, c.ID),
			s.AccessKeySentinel(c.Project, from, c.ID), s.AccessKeySentinel(c.Project, sandbox.ID, c.ID))
	}
	r := strings.NewReplacer(pairs...)
	out := make(map[string]string, len(env))
	for key, value := range env {
		out[key] = r.Replace(value)
	}
	return out, nil
}
