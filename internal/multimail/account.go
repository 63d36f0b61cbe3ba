package multimail

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/message"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
)

func (s *Server) accountRoutes() []route {
	return []route{
		{method: "GET", path: "/v1/account", serve: s.getAccount},
		{method: "PATCH", path: "/v1/account", serve: s.updateAccount},
		{method: "DELETE", path: "/v1/account", serve: s.deleteAccount},
		{method: "GET", path: "/v1/usage", serve: s.getUsage},
	}
}

// getAccount tells what a key is and what limits it. There are no plans: all may
// propose, and people decide.
func (s *Server) getAccount(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.post.Directory.Inboxes(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	out := map[string]any{
		"id": c.ID, "slug": string(c.Kind), "plan": "self-hosted", "oversight_email": nil, "physical_address": nil, "monthly_email_quota": nil,
		"max_mailboxes": nil, "is_active": true, "mailboxes": len(list), "sending_disabled": nil, "sending_disabled_reason": nil, "limits": nil,
	}
	if directory.MayManage(c.Principal) == nil {
		list = nil // a manager can have thousands, each with limits and switches of its own
	} else {
		out["sending_disabled"] = false
	}
	if c.Kind == auth.Grant {
		out["max_mailboxes"] = maxAccountMailboxes
	}
	var limits []map[string]any
	for _, b := range list {
		if _, left, err := s.post.Quotas.Sends(r.Context(), c.Principal, b.ID); err == nil {
			for _, q := range left {
				limits = append(limits, map[string]any{"mailbox_id": b.ID, "name": q.Name, "limit": q.Limit, "left": q.Left, "resets_in_seconds": int64(q.Resets / time.Second)})
			}
		}
	}
	out["limits"] = limits
	err = s.db.View(r.Context(), func(tx *store.Tx) error { //nolint:contextcheck // r's context is what is passed
		if out["name"], err = auth.ProjectName(r.Context(), tx, c.Project); err != nil {
			return err
		}
		for _, b := range list {
			_, stopped, err := s.gate.Stopped(r.Context(), tx, c.Project, b.ID, policy.Request{Kind: policy.KindSend, Inbox: b.Address})
			if err != nil {
				return err
			}
			if stopped {
				out["sending_disabled"], out["sending_disabled_reason"] = true, "a person has stopped "+b.Address
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if c.key != "" && (c.Kind == auth.Agent || c.Kind == auth.Grant) {
		now := time.Now().UTC()
		sums, _, err := s.traffic(r, c, time.Date(now.Year(), now.Month(), 1, 0, 0, 0, 0, time.UTC), now)
		switch {
		case err == nil:
			out["emails_sent_this_month"] = sums[message.Out]
		case !errors.Is(err, auth.ErrForbidden): // a key that only sends counts nothing
			return err
		}
	}
	answer(w, http.StatusOK, out)
	return nil
}

// updateAccount refuses. The attack: an agent that changes who is asked about it.
func (s *Server) updateAccount(_ http.ResponseWriter, _ *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key changes who oversees it: owners do, in the console or with postern person and postern inbox overseers: %w", auth.ErrForbidden)
	}
	return fmt.Errorf("name, oversight_email, physical_address: an account has none; invite people with postern person, and name overseers with postern inbox overseers: %w", errAbsent)
}

func (s *Server) deleteAccount(_ http.ResponseWriter, _ *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key deletes an account: delete mailboxes one by one; an owner ends the account with postern account revoke: %w", auth.ErrForbidden)
	}
	return fmt.Errorf("delete mailboxes one by one, and end the account with postern account revoke ID: %w", errAbsent)
}

// A dayCount is how much of one kind happened on one day.
type dayCount struct {
	Date  string `json:"date"`
	Event string `json:"event_type"`
	Count int64  `json:"count"`
}

// traffic counts what the mailboxes of a key sent and received.
func (s *Server) traffic(r *http.Request, c caller, from, to time.Time) (sums map[message.Direction]int64, days []dayCount, err error) {
	opened, err := s.keys(r, c, seal.Read)
	if err != nil {
		return nil, nil, err
	}
	sums, days = map[message.Direction]int64{}, []dayCount{}
	at := map[string]int{}
	for _, k := range opened {
		list, err := s.post.Traffic(r.Context(), c.Principal, k, from, to)
		if err != nil {
			return nil, nil, err
		}
		for _, t := range list {
			sums[t.Direction] += t.Messages
			d := dayCount{t.Day.Format(time.DateOnly), map[message.Direction]string{message.In: "email_received", message.Out: "email_sent"}[t.Direction], 0}
			i, ok := at[d.Date+d.Event]
			if !ok {
				i = len(days)
				at[d.Date+d.Event], days = i, append(days, d)
			}
			days[i].Count += t.Messages
		}
	}
	return sums, days, nil
}

func millis(q url.Values, name string, unset time.Time) (time.Time, error) {
	if !q.Has(name) {
		return unset, nil
	}
	n, err := strconv.ParseInt(q.Get(name), 10, 64)
	if err != nil || n < 0 || n > 1<<45 {
		return unset, fmt.Errorf("%w: %s: must be a time in milliseconds since 1970", errRequest, name)
	}
	return time.UnixMilli(n).UTC(), nil
}

func (s *Server) getUsage(w http.ResponseWriter, r *http.Request, c caller) error {
	q := r.URL.Query()
	if err := parameters(q, "from", "to", "breakdown", "period"); err != nil {
		return err
	}
	now := time.Now().UTC()
	from, err := millis(q, "from", time.Date(now.Year(), now.Month(), 1, 0, 0, 0, 0, time.UTC))
	if err != nil {
		return err
	}
	to, err := millis(q, "to", now)
	if err != nil {
		return err
	}
	daily := q.Get("breakdown") == "daily" || q.Get("period") == "daily"
	if v := q.Get("breakdown") + q.Get("period"); !daily && v != "" && v != "summary" {
		return fmt.Errorf("%w: period: must be summary or daily", errRequest)
	}
	sums, days, err := s.traffic(r, c, from, to)
	if err != nil {
		return err
	}
	out := map[string]any{"from": from.UnixMilli(), "to": to.UnixMilli()}
	if daily {
		out["breakdown"], out["data"] = "daily", days
	} else {
		// Neither calls nor decisions are counted for a key.
		out["emails_sent"], out["emails_received"], out["api_calls"], out["oversight_actions"] = sums[message.Out], sums[message.In], nil, nil
	}
	answer(w, http.StatusOK, out)
	return nil
}

// onlyPeople refuses everybody who is not a person of the project.
func onlyPeople(c caller, what string) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("no key reads %s: only a signed-in person does: %w", what, auth.ErrForbidden)
	}
	return nil
}
