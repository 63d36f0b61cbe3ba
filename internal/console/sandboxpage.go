package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/inside"
	"postern/internal/oversight"
	"postern/internal/sandbox"
	"postern/internal/store"
)

// How many log entries and connections the page of a sandbox shows.
const (
	shownLogs        = 60
	shownConnections = 12
)

// A sandboxPage is one sandbox in full.
type sandboxPage struct {
	listedSandbox
	Notice string
	Done   string // outcome of a form
	Reach  string // where it may connect to

	Waits  []oversight.Action // actions of the sandbox that wait for a person
	Charts []chart
	Logs   []sandbox.LogEntry // newest last
	Wall   []wallEntry        // newest first
	Meta   []pair

	Casts      bool          // recordings can be made
	Recordings []inside.Cast // newest first
	inner
}

// A wallEntry is a connection, or a request in one, with what was decided about it.
type wallEntry struct {
	At            time.Time
	Where         string
	Bytes         string
	Tone, Verdict string
	Why           string
	Action        string // ID of the action that decided it, or empty
	Seq           int64
}

func (s sandboxHandlers) sandbox(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.showSandbox(w, r, who, http.StatusOK, "")
}

func (s sandboxHandlers) showSandbox(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, notice string) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	ctx := r.Context()
	v := sandboxPage{listedSandbox: l, Notice: notice, Done: doneWords[r.URL.Query().Get("done")]}
	if v.Reach, err = s.reach(ctx, l); err != nil {
		return err
	}
	if v.Waits, err = s.waitsOf(ctx, who, l.ID); err != nil {
		return err
	}
	if s.conf.Samples != nil {
		now := time.Now()
		samples, err := s.conf.Samples.Samples(ctx, who, l.ID, now.Add(-time.Hour), time.Time{})
		if err != nil {
			return err
		}
		v.Charts = chartsOf(samples, chartTime(l.Started, now), now)
	}
	if s.conf.Logs != nil {
		if v.Logs, err = s.conf.Logs.Read(ctx, who, l.ID, sandbox.LogQuery{Limit: shownLogs, Backward: true}); err != nil {
			return err
		}
		for i, j := 0, len(v.Logs)-1; i < j; i, j = i+1, j-1 {
			v.Logs[i], v.Logs[j] = v.Logs[j], v.Logs[i]
		}
	}
	if v.Wall, err = s.wall(ctx, who, l.ID); err != nil {
		return err
	}
	for k, value := range l.Metadata {
		v.Meta = append(v.Meta, pair{k, value})
	}
	sortPairs(v.Meta)
	if v.Casts = s.conf.Casts != nil; v.Casts && who.Decides() {
		if v.Recordings, err = s.conf.Casts.List(l.ID); err != nil {
			return err
		}
	}
	s.lookInside(ctx, who, &v)
	p := page{Name: "sandbox", Title: "Sandbox " + l.ID, Who: who, Here: "sandboxes", Body: &v}
	if l.Live() {
		p.Tick = 10
	}
	return s.render(r.Context(), w, status, p)
}

// waitsOf returns at most 10 actions of a sandbox that wait for a person, riskiest first.
func (s sandboxHandlers) waitsOf(ctx context.Context, who auth.Principal, id string) ([]oversight.Action, error) {
	q, err := s.gate.Queue(ctx, who, oversight.QueueQuery{Proposer: auth.Principal{Kind: auth.Sandbox, ID: id}.String(), Limit: 10})
	if err != nil {
		return nil, err
	}
	var out []oversight.Action
	for _, i := range q.Items {
		out = append(out, i.Action)
	}
	return out, nil
}

// wall returns the newest connections of a sandbox.
func (s sandboxHandlers) wall(ctx context.Context, who auth.Principal, id string) (out []wallEntry, err error) {
	var list []audit.Entry
	err = audit.View(ctx, s.db, func(tx *store.Tx) error {
		list, err = audit.List(ctx, tx, audit.Query{Project: who.Project, Object: id, Verb: "egress.", Limit: shownConnections})
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, e := range list {
		out = append(out, wallOf(e))
	}
	return out, nil
}

// wallOf reads an entry about a connection. Its fields are hostile.
func wallOf(e audit.Entry) wallEntry {
	f := map[string]string{}
	for _, p := range detail(e) {
		f[p.Name] = p.Value
	}
	w := wallEntry{At: e.At, Seq: e.Seq, Why: f["reason"], Where: strings.TrimSuffix(or(f["name"], f["dst"]), "."), Verdict: "allowed", Tone: "good"}
	if f["url"] != "" {
		w.Where = strings.TrimSpace(f["method"] + " " + f["url"])
	}
	if n, err := strconv.ParseInt(f["bytes"], 10, 64); err == nil {
		w.Bytes = short(n)
	}
	if actionID().MatchString(f["action"]) {
		w.Action = f["action"]
	}
	switch e.Verb {
	case audit.EgressDenied:
		w.Verdict, w.Tone = "refused", "bad"
	case audit.EgressCaptured:
		w.Verdict, w.Tone = "mail, held", "warn"
	case audit.EgressCut:
		w.Verdict, w.Tone = "cut", "bad"
	case audit.EgressRepeated:
		w.Verdict, w.Tone = "repeats", ""
		w.Why = strings.TrimSpace(f["count"] + " more: " + w.Why)
	default:
		if w.Action != "" {
			w.Verdict, w.Tone = "approved", "accent"
		}
	}
	return w
}

// doneWords has the outcomes of forms, by the word in the address: no link can put words here.
var doneWords = map[string]string{
	"pause": "It is paused. Its memory and files stay on the disk.", "resume": "It runs again.", "extend": "It ends later now.",
	"fork": "This is the copy. It began with the memory and files of the other one.",
}

// change makes one change to a sandbox and answers with its page, or says why it did not.
func (s sandboxHandlers) change(w http.ResponseWriter, r *http.Request, who auth.Principal, done string, do func(l listedSandbox) (id string, err error)) error {
	l, err := s.find(r, who)
	if err != nil {
		return err
	}
	id, err := do(l)
	for _, known := range []struct {
		err  error
		text string
	}{
		{sandbox.ErrBound, "A contract binds this sandbox and does not leave this to people. Nothing was changed."},
		{auth.ErrForbidden, ""}, // the error page says it
		{sandbox.ErrNotFound, "Your click changed nothing: the sandbox has already ended or has not started yet."},
		{sandbox.ErrPaused, "Your click changed nothing: the sandbox is paused."},
		{sandbox.ErrRunning, "Your click changed nothing: the sandbox runs already."},
		{sandbox.ErrBusy, "The sandbox is changing its state. Try again in a moment."},
		{sandbox.ErrNotResumed, "It could not be resumed and stays paused. The record says why."},
		{sandbox.ErrNoTemplate, "Its template was deleted, so it cannot be started again."},
	} {
		if errors.Is(err, known.err) && known.text != "" {
			return s.showSandbox(w, r, who, http.StatusConflict, known.text)
		} else if errors.Is(err, known.err) {
			return err
		}
	}
	if errors.Is(err, sandbox.ErrFull) || errors.Is(err, sandbox.ErrInvalid) {
		return s.showSandbox(w, r, who, http.StatusConflict, sentence(err.Error()))
	}
	if err != nil {
		return err
	}
	to := "/console/sandboxes/" + url.PathEscape(or(id, l.ID))
	if done != "" {
		to += "?done=" + done
	}
	http.Redirect(w, r, to, http.StatusSeeOther)
	return nil
}

func (s sandboxHandlers) kill(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.change(w, r, who, "", func(l listedSandbox) (string, error) { return "", s.fleet.Kill(r.Context(), who, l.ID) })
}

func (s sandboxHandlers) pause(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.change(w, r, who, "pause", func(l listedSandbox) (string, error) {
		return "", s.fleet.Pause(r.Context(), who, l.ID, false)
	})
}

func (s sandboxHandlers) resume(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.change(w, r, who, "resume", func(l listedSandbox) (string, error) {
		_, _, err := s.fleet.Connect(r.Context(), who, l.ID, sandbox.ConnectRequest{Timeout: max(l.Options.Timeout, time.Minute), Resume: true})
		return "", err
	})
}

// fork copies a running sandbox once. The copy lives as long as the creator of the original
// requested for the original.
func (s sandboxHandlers) fork(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.change(w, r, who, "fork", func(l listedSandbox) (string, error) {
		out, err := s.fleet.Fork(r.Context(), who, l.ID, max(l.Options.Timeout, time.Minute), 1)
		if err != nil {
			return "", err
		}
		return out[0].ID, out[0].Err
	})
}

// longer lists the times by which the page extends the life of a sandbox.
var longer = map[string]time.Duration{"15m": 15 * time.Minute, "1h": time.Hour, "4h": 4 * time.Hour, "24h": 24 * time.Hour}

func (s sandboxHandlers) extend(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	d, ok := longer[r.PostForm.Get("for")]
	if !ok {
		return fmt.Errorf("%w: choose by how much", errForm)
	}
	return s.change(w, r, who, "extend", func(l listedSandbox) (string, error) {
		_, err := s.fleet.SetTimeout(r.Context(), who, l.ID, time.Until(l.Ends)+d, true)
		return "", err
	})
}

// sortPairs sorts details by name.
func sortPairs(all []pair) {
	slices.SortFunc(all, func(a, b pair) int { return strings.Compare(a.Name, b.Name) })
}
