package notify

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/oversight"
	"postern/internal/store"
)

// slackPath is the path of Slack's requests; the room's ID follows.
const slackPath = "/notify/slack/"

const (
	maxPress   = 256 << 10               // bytes of a request
	slackClock = 5 * time.Minute         // how far a request's time may differ from ours
	slackTime  = 2500 * time.Millisecond // Slack waits 3 s for the answer
)

// A slackPress is what Slack sends when somebody presses a button. Slack has signed it, but
// its values may be made up: it proves who pressed, and nothing about the message.
type slackPress struct {
	Type string `json:"type"`
	Team struct {
		ID string `json:"id"`
	} `json:"team"`
	User struct {
		ID       string `json:"id"`
		Username string `json:"username"`
		Name     string `json:"name"`
		TeamID   string `json:"team_id"`
	} `json:"user"`
	Channel struct {
		ID string `json:"id"`
	} `json:"channel"`
	Container struct {
		MessageTS string `json:"message_ts"`
	} `json:"container"`
	Actions []struct {
		ID    string `json:"action_id"`
		Value string `json:"value"`
	} `json:"actions"`
	State struct {
		Values map[string]map[string]struct {
			Value string `json:"value"`
		} `json:"values"`
	} `json:"state"`
}

// parseSlackPress parses the body of a request, which is hostile.
func parseSlackPress(body []byte) (p slackPress, ok bool) {
	form, err := url.ParseQuery(string(body))
	if err != nil || len(form["payload"]) != 1 {
		return p, false
	}
	if json.Unmarshal([]byte(form.Get("payload")), &p) != nil {
		return slackPress{}, false
	}
	if p.User.TeamID == "" { // absent for members of the app's own workspace in old payloads
		p.User.TeamID = p.Team.ID
	}
	return p, p.Type == "block_actions" && p.User.ID != "" && p.User.TeamID != "" && len(p.Actions) == 1
}

// slackSigned reports whether header and body are signed with secret, at a time that differs
// from now by at most slackClock. See Slack's "Verifying requests", version v0.
func slackSigned(secret auth.Secret, h http.Header, body []byte, now time.Time) bool {
	ts, err := strconv.ParseInt(h.Get("X-Slack-Request-Timestamp"), 10, 64)
	if err != nil || secret == "" {
		return false
	}
	if d := now.Sub(time.Unix(ts, 0)); d > slackClock || d < -slackClock {
		return false
	}
	m := hmac.New(sha256.New, []byte(secret.Reveal()))
	m.Write([]byte("v0:" + strconv.FormatInt(ts, 10) + ":"))
	m.Write(body)
	return hmac.Equal([]byte("v0="+hex.EncodeToString(m.Sum(nil))), []byte(h.Get("X-Slack-Signature")))
}

// serveSlack answers a press in Slack. It records everything before it answers. A text
// for the person follows after the answer, since Slack waits only 3 s.
func (n *Notifier) serveSlack(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), slackTime)
	defer cancel()
	refuse := func(status int) { http.Error(w, http.StatusText(status), status) }
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxPress))
	if err != nil {
		refuse(http.StatusRequestEntityTooLarge)
		return
	}
	var room Room
	err = n.db.View(ctx, func(tx *store.Tx) (err error) {
		room, err = n.roomByID(ctx, tx, "", r.PathValue("room"))
		return err
	})
	if err != nil && !errors.Is(err, store.ErrNotFound) {
		n.log.ErrorContext(ctx, "look up room", "err", err)
		refuse(http.StatusInternalServerError)
		return
	}
	var s roomSecret
	if err == nil && room.Kind == Slack {
		s, err = n.open(&room)
	}
	// The answer is the same whether the room is unknown, takes no decisions, or the
	// signature is forged or old.
	if err != nil || !slackSigned(s.Signing, r.Header, body, time.Now()) {
		refuse(http.StatusUnauthorized)
		return
	}
	// The attack: somebody replays a signed request. A replay would change nothing, except
	// if the person has just been asked again.
	fresh := false
	err = n.db.Update(ctx, func(tx *store.Tx) (err error) {
		sum := sha256.Sum256([]byte(room.ID + " " + r.Header.Get("X-Slack-Signature")))
		fresh, err = tx.Changed(ctx, `insert into slack_seen (hash, at) values ($1, $2) on conflict do nothing`, hex.EncodeToString(sum[:]), store.Time(time.Now()))
		return err
	})
	if err != nil {
		n.log.ErrorContext(ctx, "record press", "err", err)
		refuse(http.StatusInternalServerError)
		return
	}
	p, ok := parseSlackPress(body)
	if !fresh || !ok {
		refuse(http.StatusBadRequest)
		return
	}
	said, err := n.slackPressed(ctx, room, p)
	if err != nil {
		n.log.ErrorContext(ctx, "handle press", "room", room.ID, "err", err)
		said = "Internal error. Use the console."
	}
	w.Header().Set("Content-Length", "0")
	w.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(w).Flush() // Slack may have left; the text below is a courtesy
	if said == "" {
		return
	}
	after, done := context.WithTimeout(context.WithoutCancel(ctx), sendOnce)
	defer done()
	_, res := n.slack.call(after, s.Token, "chat.postEphemeral", map[string]any{
		"channel": room.Channel, "user": p.User.ID, "text": slackEscape(said), "parse": "none", "link_names": false,
	})
	if res.err != nil {
		n.log.DebugContext(after, "answer a press", "room", room.ID, "err", res.err)
	}
}

// slackPerson returns the person of a project who has linked an account in Slack.
func slackPerson(ctx context.Context, tx *store.Tx, project, team, user string) (person, error) {
	var id string
	if err := tx.One(ctx, `select person_id from slack_link where team_id = $1 and user_id = $2`, []any{team, user}, &id); err != nil {
		return person{}, err
	}
	p, err := withoutForged(ctx, tx)(scanPerson(tx.QueryRowContext(ctx, selectPeople+`and p.id = $1 and p.project_id = $2`, id, project).Scan))
	if err != nil {
		return person{}, err
	}
	// The attack: somebody who can write the database links their account to a person.
	for _, row := range []store.Sealed{auth.SealedPeople(), SealedSlackLinks()} {
		where := `id = $1`
		if row.Table == "slack_link" {
			where = `person_id = $1`
		}
		if ours, err := tx.Holding(ctx, row, where, p.id); err != nil {
			return person{}, err
		} else if !ours {
			return person{}, store.ErrNotFound
		}
	}
	return p, nil
}

// SealedSlackLinks describes the authenticated rows that link accounts in Slack to people.
func SealedSlackLinks() store.Sealed {
	return store.Sealed{Table: "slack_link", Key: []string{"person_id"}, Only: []string{"person_id", "team_id", "user_id", "at"}}
}

// slackPressed carries out what a button asks for and returns the text for the person
// who pressed it.
func (n *Notifier) slackPressed(ctx context.Context, room Room, q slackPress) (string, error) {
	switch q.Actions[0].ID {
	case "open": // a link; Slack reports these presses too
		return "", nil
	case "approve", "reject":
	default:
		return saidUnknown, nil
	}
	p, ok := parsePress(q.Actions[0].Value)
	if !ok || q.Channel.ID != room.Channel || q.Container.MessageTS == "" {
		return saidUnknown, nil
	}
	var who, maker person
	var whole int
	linked := true
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		if maker, err = roomMaker(ctx, tx, room); err != nil {
			return err
		}
		who, err = slackPerson(ctx, tx, room.Project, q.User.TeamID, q.User.ID)
		if linked = !errors.Is(err, store.ErrNotFound); err != nil {
			return err
		}
		// The attack: somebody sends the value of another message's button, or invents one.
		return tx.One(ctx, `select whole from notice where channel = $1 and person_id = $2 and posted = $3 and action_id = $4 and version = $5`,
			[]any{Slack, room.ID, q.Container.MessageTS, p.action, p.version}, &whole)
	})
	switch {
	case !linked:
		return n.slackCode(ctx, room, q)
	case errors.Is(err, store.ErrNotFound):
		return saidUnknown, nil
	case err != nil:
		return "", err
	}
	a, err := n.gate.Action(ctx, who.Principal, p.action)
	if errors.Is(err, store.ErrNotFound) {
		return saidUnknown, nil
	}
	if err != nil {
		return "", err
	}
	switch {
	case a.State != oversight.Pending || a.Version != p.version || prefix(a) != p.prefix:
		return saidStale, nil
	case whole == 0:
		return saidUnseen, nil
	case !who.asked(a):
		return "Nothing was changed: policy asks others to decide on this.", nil
	case a.StepUp:
		return saidStepUp, nil
	case !room.trusted(maker, a):
		return saidAlone, nil
	}
	if may, err := n.mayDecide(ctx, a); err != nil || !may {
		return saidPolicy, err
	}
	d := oversight.Decision{ID: a.ID, Version: p.version, Digest: a.Hex(), Approve: p.verb == approve}
	if !d.Approve {
		d.Reason = strings.ReplaceAll(strings.ToValidUTF8(q.State.Values["reason"]["reason"].Value, "\ufffd"), "\x00", "")
		if strings.TrimSpace(d.Reason) == "" {
			return "Nothing was changed: write a reason into the field above the buttons, then press Reject. The agent reads it.", nil
		}
	}
	said, err := n.decide(ctx, who, Slack, room.ID, d)
	if said != "" || err != nil {
		return said, err
	}
	if d.Approve {
		return n.afterApproval(ctx, a, "Approved."), nil
	}
	return "Rejected. The agent will read your reason.", nil
}

const saidAlone = "Nothing was changed. Whoever set this channel up could press for others, and could not decide on this alone: it needs more than one person, or particular people, or they wrote it, or they are no owner any more. Decide in the console."

// roomMaker returns the person who set a room up, with their current role. It returns a zero
// person for the operator at the machine, and for somebody who has no account any more.
func roomMaker(ctx context.Context, tx *store.Tx, r Room) (person, error) {
	name, ok := strings.CutPrefix(r.CreatedBy, string(auth.Person)+":")
	if !ok || auth.Nameless(r.CreatedBy) {
		return person{}, nil
	}
	p, err := named(ctx, tx, r.Project, name)
	if errors.Is(err, store.ErrNotFound) {
		return person{}, nil
	}
	return p, err
}

// trusted reports whether presses in r may decide on a. The person who set the room up knows
// the secret with which Slack signs. The attack: an owner signs a colleague's press with it,
// and so approves as two people, as a person whom policy names, or something that they wrote
// themselves; or they continue after they lost the role or the account. So a press counts
// only if maker, the person who set the room up, could decide on a alone now. The operator at
// the machine could do all that anyway.
func (r *Room) trusted(maker person, a oversight.Action) bool {
	if auth.Nameless(r.CreatedBy) {
		return true
	}
	return maker.id != "" && maker.Manages() && a.Approvers <= 1 && a.Asks(maker.Principal) && a.Bars(maker.Principal) == ""
}

// slackCode makes a code for an account in Slack that is not linked. Slack shows it
// only to the holder of that account, who types it into the console, signed in.
func (n *Notifier) slackCode(ctx context.Context, room Room, q slackPress) (string, error) {
	code := auth.Secret(rand.Text())
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		// Only the newest code counts, so that repeated presses do not fill the table.
		if _, err := tx.ExecContext(ctx, `delete from slack_code where team_id = $1 and user_id = $2`, q.User.TeamID, q.User.ID); err != nil {
			return err
		}
		_, err := tx.ExecContext(ctx, `insert into slack_code (hash, project_id, team_id, user_id, name, expires_at, used_at) values ($1, $2, $3, $4, $5, $6, 0)`,
			digest(code), room.Project, q.User.TeamID, q.User.ID, mail.Printable(or(q.User.Username, q.User.Name), 64), store.Time(time.Now().Add(CodeTime)))
		if err != nil {
			return err
		}
		return tx.Seal(ctx, SealedSlackCodes(), `hash = $1`, digest(code))
	})
	if err != nil {
		return "", err
	}
	return "Nothing was changed: your account in Slack is not linked to an account of Postern. To link it, sign in at " + n.conf.Base +
		"/console/account/notifications and type this code within 15 minutes: " + code.Reveal() + "\nGive it to nobody: whoever types it lets your account here decide as them.", nil
}

// SealedSlackCodes describes the authenticated rows of codes that link an account in Slack
// to a person.
func SealedSlackCodes() store.Sealed {
	return store.Sealed{Table: "slack_code", Key: []string{"hash"}, Only: []string{"hash", "project_id", "team_id", "user_id"}}
}
