package mailapi

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"unicode/utf8"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/mailbox"
	"postern/internal/oversight"
	"postern/internal/policy"
)

// A queueServer serves what waits for a person, in the order in which it should be
// looked at. It lets a person put an action off and assign it; neither decides anything.
type queueServer struct {
	gate *oversight.Gate
	post *mailbox.PostOffice
}

func (s queueServer) routes() []route {
	return []route{
		{"GET", "/v1/queue", 0, s.queue},
		{"PUT", "/v1/actions/{id}/snooze", maxBody, s.snooze},
		{"DELETE", "/v1/actions/{id}/snooze", 0, s.unsnooze},
		{"PUT", "/v1/actions/{id}/assignee", maxBody, s.assign},
		{"DELETE", "/v1/actions/{id}/assignee", 0, s.unassign},
	}
}

const maxQueueText = 320 // bytes of a text that the queue is filtered by

// textParameter returns a text of the query. The attack: a NUL or bytes that are not
// UTF-8, which PostgreSQL refuses with an error that is ours to explain.
func textParameter(q url.Values, name string) (string, error) {
	v := q.Get(name)
	if len(v) > maxQueueText || strings.IndexByte(v, 0) >= 0 || !utf8.ValidString(v) {
		return "", fmt.Errorf("%w: %s: must be at most %d bytes of UTF-8, without NUL", errRequest, name, maxQueueText)
	}
	return v, nil
}

// flagParameter returns a parameter that is true or false.
func flagParameter(q url.Values, name string) (bool, error) {
	switch q.Get(name) {
	case "", "false":
		return false, nil
	case "true":
		return true, nil
	}
	return false, fmt.Errorf("%w: %s: must be true or false", errRequest, name)
}

// queueQuery reads the parameters of a request for the queue.
func queueQuery(q url.Values) (out oversight.QueueQuery, err error) {
	err = onlyParameters(q, "order", "kind", "inbox", "proposer", "recipient", "q", "mine", "assigned", "grave", "snoozed", "cursor", "limit")
	if err != nil {
		return out, err
	}
	switch out.Order = oversight.QueueOrder(q.Get("order")); out.Order {
	case "", oversight.ByRisk, oversight.ByAge:
	default:
		return out, fmt.Errorf("%w: order: must be %s or %s", errRequest, oversight.ByRisk, oversight.ByAge)
	}
	if v := q.Get("kind"); v != "" {
		for name := range strings.SplitSeq(v, ",") {
			k := policy.Kind(name)
			if !slices.Contains(policy.Kinds(), k) || slices.Contains(out.Kinds, k) {
				return out, fmt.Errorf("%w: kind: must be different kinds of action, separated by commas: %s", errRequest, policy.JoinKinds(policy.Kinds()))
			}
			out.Kinds = append(out.Kinds, k)
		}
	}
	for name, to := range map[string]*string{"inbox": &out.Inbox, "proposer": &out.Proposer, "recipient": &out.Recipient, "q": &out.Words, "cursor": &out.After} {
		if *to, err = textParameter(q, name); err != nil {
			return out, err
		}
	}
	for name, to := range map[string]*bool{"mine": &out.Mine, "assigned": &out.Assigned, "grave": &out.Grave, "snoozed": &out.Snoozed} {
		if *to, err = flagParameter(q, name); err != nil {
			return out, err
		}
	}
	out.Limit, err = limit(q, 50, 500)
	return out, err
}

func (s queueServer) queue(w http.ResponseWriter, r *http.Request, c caller) error {
	if c.Kind != auth.Person {
		return fmt.Errorf("the queue is what waits for a person, so only a person sees it: %w", auth.ErrForbidden)
	}
	ctx := r.Context()
	query, err := queueQuery(r.URL.Query())
	if err != nil {
		return err
	}
	if query.Inbox != "" {
		b, err := s.post.Directory.Find(ctx, c.Principal, query.Inbox)
		if err != nil {
			return err
		}
		query.Inbox = b.ID
	}
	q, err := s.gate.Queue(ctx, c.Principal, query)
	if err != nil {
		return err
	}
	off := map[string]*api.Snooze{}
	if query.Snoozed {
		list, err := s.gate.Snoozed(ctx, c.Principal)
		if err != nil {
			return err
		}
		for _, z := range list {
			off[z.Action] = snoozeOf(z)
		}
	}
	out := api.ReviewQueue{NextCursor: q.Next, Total: q.Total, Counts: api.QueueCounts{
		Waiting: q.Waiting, Kinds: map[string]int{}, Inboxes: q.Inboxes, Grave: q.Grave, Soon: q.Soon, Snoozed: q.Snoozed,
	}}
	for k, n := range q.Kinds {
		out.Counts.Kinds[string(k)] = n
	}
	out.Actions = each(q.Items, func(i oversight.Queued) api.QueuedAction {
		return api.QueuedAction{Action: actionOf(c, i.Action), Risk: i.Risk, Reasons: append([]string{}, i.Reasons...), Snooze: off[i.ID]}
	})
	answer(w, http.StatusOK, out)
	return nil
}

func snoozeOf(z oversight.Snooze) *api.Snooze {
	return &api.Snooze{Until: z.Until, OnAnswer: z.OnAnswer, At: z.At}
}

func (s queueServer) snooze(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	var in api.NewSnooze
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	if in.Until == nil && !in.OnAnswer {
		return fmt.Errorf("%w: until: is required without on_answer", errRequest)
	}
	z, err := s.gate.Snooze(r.Context(), c.Principal, id, orZero(in.Until), in.OnAnswer)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, snoozeOf(z))
	return nil
}

func (s queueServer) unsnooze(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.gate.Unsnooze(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s queueServer) assign(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	name, err := aPerson(r)
	if err != nil {
		return err
	}
	if err := s.gate.Assign(r.Context(), c.Principal, id, name); err != nil {
		return err
	}
	a, err := s.gate.Action(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, actionOf(c, a))
	return nil
}

func (s queueServer) unassign(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayDecide(c); err != nil {
		return err
	}
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.gate.Assign(r.Context(), c.Principal, id, ""); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
