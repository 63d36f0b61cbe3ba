package webhook

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/oversight"
	"postern/internal/policy"
	"postern/internal/store"
)

// A webhook is a channel out: its creator chooses the path and the query of the
// URL, and when requests are sent. So the URL of a webhook that an agent creates
// waits as an action until policy or a person approves all of it; on many hosts the
// path says who gets the request. The same holds for additional types of events.
// Project keys and people create webhooks without approval: they are the operator's
// programs and people, who may read the events anyway.

// maxProposals bounds the pending actions of one credential. A new proposal cancels
// the former one of its webhook, so there are seldom more than webhooks. The attack:
// proposing faster than that.
const maxProposals = 2 * maxHooks

// A request is the payload of an action of kind [policy.KindWebhook].
type request struct {
	Webhook    string `json:"webhook"`
	URL        string `json:"url"`
	Name       string `json:"name"`
	Events     string `json:"events"`
	Inbox      string `json:"inbox"` // its address; empty means all inboxes of the credential
	Credential string `json:"credential"`
}

// needsApproval reports whether webhooks of o need approval.
func (o owner) needsApproval() bool { return o.credential != "" }

// proposeURL proposes the URL of w, whose row is in tx, and records the action.
func (h *Hooks) proposeURL(ctx context.Context, tx *store.Tx, who auth.Principal, w *Webhook) error {
	var n int
	if err := tx.One(ctx, `select count(*) from action where project_id = $1 and kind = $2 and proposer = $3 and state = $4`,
		[]any{w.Project, policy.KindWebhook, who.String(), oversight.Pending}, &n); err != nil {
		return err
	}
	if n >= maxProposals {
		return fmt.Errorf("%d webhooks of this key wait for approval: %w", n, oversight.ErrFull)
	}
	u, err := url.Parse(w.URL)
	if err != nil {
		return fmt.Errorf("%w: url: is not a URL", ErrInvalid) // unreachable: checkURL
	}
	r := policy.Request{
		Kind: policy.KindWebhook, Via: "rest", To: []string{strings.ToLower(u.Hostname())},
		Detail: map[string]string{"url": w.URL, "host": strings.ToLower(u.Hostname())},
	}
	if w.Inbox != "" {
		if r.Inbox, r.Mode, err = directory.AddressAndMode(ctx, tx, w.Inbox); err != nil {
			return err
		}
	}
	payload, err := json.Marshal(request{Webhook: w.ID, URL: w.URL, Name: w.Name, Events: w.joined(), Inbox: r.Inbox, Credential: w.Credential})
	if err != nil {
		return err
	}
	r.Size = int64(len(payload))
	a, err := h.gate.Propose(ctx, tx, who, oversight.Proposal{Request: r, Inbox: w.Inbox, Via: r.Via, Payload: payload})
	if err != nil {
		return err
	}
	w.Waits = a.ID
	if a.State == oversight.Denied {
		w.Enabled, w.Reason = false, refusal(a)
	}
	// What is under way to the former URL does not go to this one.
	if err := abandon(ctx, tx, w.ID, "the URL of the webhook waits for approval"); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `update webhook set waits = $1, enabled = $2, reason = $3 where id = $4`, w.Waits, w.Enabled, w.Reason, w.ID)
	return err
}

// cancelProposal cancels an action that asks for a URL which the webhook has no more.
// It need not succeed: carried out, such an action changes nothing.
func (h *Hooks) cancelProposal(ctx context.Context, who auth.Principal, action string) {
	if action == "" {
		return
	}
	if _, err := h.gate.Cancel(ctx, who, action); err != nil && !errors.Is(err, oversight.ErrTooLate) {
		h.log.DebugContext(ctx, "take back action of a webhook", "action", action, "err", err)
	}
}

// refusal says why the action of a webhook was not executed.
func refusal(a oversight.Action) string {
	why := a.Reason
	if why == "" {
		why = a.Verdict
	}
	if a.State != oversight.Denied {
		why = string(a.State)
	}
	return fmt.Sprintf("its URL was not approved (%s): %s", a.ID, why)
}

var (
	_ oversight.Executor  = (*Hooks)(nil)
	_ oversight.Finisher  = (*Hooks)(nil)
	_ oversight.Recoverer = (*Hooks)(nil)
	_ oversight.Watcher   = (*Hooks)(nil)
)

// Execute implements [oversight.Executor]. It only checks; [Hooks.Finish] makes the
// change in the transaction of the outcome.
func (h *Hooks) Execute(ctx context.Context, a oversight.Action) oversight.Outcome {
	var r request
	if err := json.Unmarshal(a.Payload, &r); err != nil || r.Webhook == "" {
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the request is malformed"}
	}
	err := h.db.View(ctx, func(tx *store.Tx) error {
		var id string
		return tx.One(ctx, `select id from webhook where id = $1 and waits = $2 and url = $3`, []any{r.Webhook, a.ID, r.URL}, &id)
	})
	switch {
	case errors.Is(err, store.ErrNotFound):
		return oversight.Outcome{State: oversight.Failed, Detail: "nothing was changed: the webhook's URL has changed since, or it was deleted"}
	case err != nil:
		return oversight.Outcome{State: oversight.Approved, Detail: "nothing was changed: the database could not be reached", Free: true}
	}
	return oversight.Outcome{State: oversight.Done, Detail: "the webhook now receives events"}
}

// Finish implements [oversight.Finisher].
func (h *Hooks) Finish(ctx context.Context, tx *store.Tx, a oversight.Action, o oversight.Outcome) error {
	if o.State != oversight.Done {
		return nil
	}
	_, err := tx.ExecContext(ctx, `update webhook set waits = '' where waits = $1`, a.ID)
	return err
}

// Interrupted implements [oversight.Recoverer]. An execution has no effect of its
// own, so it can be repeated.
func (h *Hooks) Interrupted(context.Context, *store.Tx, oversight.Action) (oversight.Outcome, error) {
	return oversight.Outcome{State: oversight.Approved, Detail: "the program stopped before anything was changed"}, nil
}

// Moved implements [oversight.Watcher]: a webhook whose URL was refused is
// disabled, with the reason.
func (h *Hooks) Moved(ctx context.Context, tx *store.Tx, a oversight.Action) error {
	switch a.State {
	case oversight.Denied, oversight.Cancelled, oversight.Failed:
		if _, err := tx.ExecContext(ctx, `update webhook set enabled = $1, reason = $2 where waits = $3`, false, refusal(a), a.ID); err != nil {
			return err
		}
	case oversight.Scheduled, oversight.Pending, oversight.Approved, oversight.Executing, oversight.Done, oversight.Unknown:
	}
	if h.conf.Announce == nil || a.Inbox == "" {
		return nil
	}
	return h.conf.Announce(ctx, tx, a)
}

// Show implements [oversight.Executor].
func (h *Hooks) Show(a oversight.Action) (oversight.View, error) {
	var r request
	unknown, err := oversight.ReadPayload(a.Payload, &r)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	u, err := url.Parse(r.URL)
	if err != nil {
		return oversight.View{}, fmt.Errorf("show action %s: %w", a.ID, err)
	}
	v := oversight.View{
		Title: "Webhook to " + u.Host,
		Fields: []oversight.Field{
			{Name: "URL", Value: r.URL}, {Name: "Inbox", Value: r.Inbox}, {Name: "Events", Value: r.Events}, {Name: "Name", Value: r.Name}, {Name: "Key", Value: r.Credential},
		},
		Text: "If approved, this server sends a request to this URL each time one of these events happens, until the webhook or the key that created it ends. The requests contain ids and times, no mail.",
	}
	if r.Inbox == "" {
		v.Fields[1].Value = "all inboxes that the key has access to"
	}
	if u.Path != "" && u.Path != "/" || u.RawQuery != "" {
		v.Notes = append(v.Notes, "the agent chose the path and the query of the URL, and the host gets them with each request")
	}
	if r.Webhook != "" {
		v.Fields = append(v.Fields, oversight.Field{Name: "Webhook", Value: r.Webhook})
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"https": "443", "http": "80"}[u.Scheme]
	}
	v.AddPanel("Where events are sent", oversight.FormHosts, "", oversight.PanelRow{Name: "Host", Value: u.Hostname(), Note: "port " + port})
	v.AddPanel("Each time", oversight.FormLine, "This server sends a request to this address. The request has ids and times, no mail.", oversight.PanelRow{Name: "URL", Value: r.URL})
	events := oversight.Panel{Name: "What it sends", Form: oversight.FormFacts}
	for _, f := range v.Fields[1:] {
		if f.Value != "" {
			events.Rows = append(events.Rows, oversight.PanelRow{Name: f.Name, Value: f.Value})
		}
	}
	events.Rows = append(events.Rows, oversight.PanelRow{Name: "Until", Value: "the webhook is deleted, or the key that created it ends"})
	v.Panels = append(v.Panels, events)
	v.Fields = slices.DeleteFunc(v.Fields, func(f oversight.Field) bool { return f.Value == "" })
	v.InPanel = true
	v.Unknown(unknown)
	return v, nil
}
