package console

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/permit"
	"postern/internal/policy"
)

// putOffHandlers let a reviewer take an action off their own list for a time, and ask a
// colleague to look at it. Neither decides anything.
type putOffHandlers struct{ actionHandlers }

func (s putOffHandlers) routes() []route {
	return []route{
		{"POST", "/console/actions/{id}/snooze", decides, s.snooze},
		{"POST", "/console/actions/{id}/wake", decides, s.wake},
		{"POST", "/console/actions/{id}/assign", decides, s.assign},
	}
}

// A moment is a time that a form offers.
type moment struct {
	Value, Text string
	At          time.Time // zero means when the agent sends another version
}

// morning is when a working day begins, in hours UTC.
const morning = 9

// moments returns the times until which an action that is denied at expires can be put
// off. Times after that are not offered: there would be nothing to come back to.
func moments(now, expires time.Time) (out []moment) {
	now = now.UTC()
	day := func(days int) time.Time {
		return time.Date(now.Year(), now.Month(), now.Day()+days, morning, 0, 0, 0, time.UTC)
	}
	hour := now.Add(time.Hour).Truncate(time.Minute)
	monday := day((8-int(now.Weekday())-1)%7 + 1)
	for _, m := range []moment{
		{"hour", "in one hour, at " + hour.Format("15:04 UTC"), hour},
		{"tomorrow", "tomorrow at " + day(1).Format("15:04 UTC"), day(1)},
		{"monday", "on Monday, " + monday.Format("2 January at 15:04 UTC"), monday},
	} {
		if (expires.IsZero() || m.At.Before(expires)) && (m.Value != "monday" || !m.At.Equal(day(1))) {
			out = append(out, m)
		}
	}
	return append(out, moment{Value: "answer", Text: "when the agent sends another version"})
}

// momentOf returns the time that was chosen in a form.
func momentOf(r *http.Request, expires time.Time) (moment, error) {
	all := moments(time.Now(), expires)
	i := slices.IndexFunc(all, func(m moment) bool { return m.Value == r.PostForm.Get("until") })
	if i < 0 {
		return moment{}, fmt.Errorf("%w: until must be a time that the page offers", errForm)
	}
	return all[i], nil
}

func (s putOffHandlers) snooze(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	a, err := s.gate.Action(r.Context(), who, id)
	if err != nil {
		return err
	}
	m, err := momentOf(r, a.Expires)
	if err != nil {
		return err
	}
	return s.thenNext(w, r, who, id, func(ctx context.Context) error {
		_, err := s.gate.Snooze(ctx, who, id, m.At, m.Value == "answer")
		return err
	})
}

func (s putOffHandlers) wake(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	return s.after(w, r, who, id, s.gate.Unsnooze(r.Context(), who, id))
}

func (s putOffHandlers) assign(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	id, err := pathAction(r)
	if err != nil {
		return err
	}
	return s.after(w, r, who, id, s.gate.Assign(r.Context(), who, id, r.PostForm.Get("person")))
}

// colleagues returns the names of the people to whom an action can be assigned: those whom
// policy names, the viewer, the present assignee and, for an owner, everybody who decides.
func (s putOffHandlers) colleagues(r *http.Request, who auth.Principal, a *oversight.Action) ([]string, error) {
	out := []string{who.ID}
	for _, name := range a.Who {
		if !strings.Contains(name, ":") {
			out = append(out, name)
		}
	}
	if a.Assignee != "" {
		out = append(out, a.Assignee)
	}
	if who.Manages() {
		all, err := s.conf.People.List(r.Context(), who)
		if err != nil {
			return nil, err
		}
		for _, p := range all {
			if them := (auth.Principal{Kind: auth.Person, ID: p.Name, Role: p.Role, Project: who.Project}); p.Disabled.IsZero() && isApprover(them, a) {
				out = append(out, p.Name)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

// A permission is what an approval can allow in addition to the action itself.
type permission struct{ Value, Text string }

// permissions returns which similar actions can be allowed until a time, the narrowest
// first. It returns none if a finding is grave: a tick is for one action only.
func (r *review) permissions() (out []permission) {
	if len(r.Grave()) > 0 || r.Approvers > 1 {
		return nil
	}
	switch r.Kind {
	case policy.KindRequest, policy.KindConnect:
		return r.wayOut()
	case mailbox.SendKind:
	default:
		return nil
	}
	if r.ByRequest {
		return nil
	}
	var domains []string
	for _, p := range slices.Concat(r.To, r.Cc) {
		out = append(out, permission{"address:" + p.Addr, "to exactly " + p.Addr})
		if d := mail.Domain(p.Addr); !slices.Contains(domains, d) {
			domains = append(domains, d)
		}
	}
	for _, d := range domains {
		out = append(out, permission{"domain:" + d, "to anyone at " + d})
	}
	if len(out) > 8 { // nobody chooses from a list that long
		return out[:1]
	}
	return out
}

// The times for which an approval can allow similar actions.
var ends = []struct {
	Value, Text string
	Days        int
}{{"day", "for one day", 1}, {"week", "for 7 days", 7}, {"month", "for 30 days", 30}}

// allowed reads what a form allows in addition to the action; nil if nothing.
func allowed(r *http.Request) (*oversight.Allowance, error) {
	if r.PostForm.Get("also") != "allow" {
		return nil, nil
	}
	i := slices.IndexFunc(ends, func(e struct {
		Value, Text string
		Days        int
	},
	) bool {
		return e.Value == r.PostForm.Get("ends")
	})
	kind, value, ok := strings.Cut(r.PostForm.Get("scope"), ":")
	if i < 0 || !ok {
		return nil, fmt.Errorf("%w: scope and end must be what the page offers", errForm)
	}
	w := &oversight.Allowance{Files: r.PostForm.Get("files") == "yes", Until: time.Now().Add(time.Duration(ends[i].Days) * 24 * time.Hour)}
	switch kind {
	case "address":
		w.Address = value
	case "domain":
		w.Domain = value
	case "host":
		w.Address, w.Path, _ = strings.Cut(value, " ")
	default:
		return nil, fmt.Errorf("%w: scope must be what the page offers", errForm)
	}
	return w, nil
}

// refusedText returns why the gate refused a form, or "" for other errors.
func refusedText(err error) string {
	for _, known := range []error{oversight.ErrUnseen, oversight.ErrAllowance, oversight.ErrSnooze, oversight.ErrAssign} {
		if errors.Is(err, known) {
			why := strings.TrimSuffix(err.Error(), ": "+known.Error())
			if _, after, ok := strings.Cut(why, ": "); ok && strings.HasPrefix(why, "decide on act_") {
				why = after
			}
			if errors.Is(err, oversight.ErrUnseen) {
				return "Not approved: each grave finding needs its own tick. " + sentence(why) + " Nothing was changed."
			}
			return cmp.Or(sentence(why), sentence(known.Error())) + " Nothing was changed."
		}
	}
	return ""
}

// wayOut returns what an approval of a request or a connection can allow in addition.
func (r *review) wayOut() (out []permission) {
	if !permit.Answers(policy.Verdict{Effect: policy.Ask, Rule: r.Rule, Approvers: r.Approvers, StepUp: r.StepUp, Who: r.Who}) || len(r.Request.To) != 1 {
		return nil
	}
	host := r.Request.To[0]
	if _, err := policy.PublicName(host); err != nil {
		return nil
	}
	if r.Kind == policy.KindConnect {
		port := r.Request.Detail["port"]
		return []permission{{"host:" + host, "connections of this sandbox to " + host + ", port " + port + ", with any content"}}
	}
	h := r.Request.HTTP
	if h == nil || r.View.Request == nil || h.Host != host {
		return nil
	}
	for _, path := range permit.Patterns(h.Path) {
		what := "to exactly this path, " + path
		switch {
		case path == "/*":
			what = "to every path of this host"
		case strings.HasSuffix(path, "*"):
			what = "to every path below " + strings.TrimSuffix(path, "*")
		}
		out = append(out, permission{"host:" + host + " " + path, h.Method + " requests of this sandbox to " + host + " " + what + ", with any parameters, headers and body"})
	}
	return out
}
