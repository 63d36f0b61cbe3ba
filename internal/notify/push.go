package notify

import (
	"context"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/mail"
	"postern/internal/store"
)

// A Subscription is what a browser provides for push messages: the URL to send them to,
// and the keys to encrypt them with.
type Subscription struct {
	Endpoint string
	P256DH   string // the browser's public key, base64url
	Auth     string // its authentication secret, base64url
}

// A Device is a browser of a person that gets push messages.
type Device struct {
	ID      string
	Name    string // how the browser describes itself
	Host    string // of the push service
	Created time.Time
	Sent    time.Time // of the newest message; zero if there is none
	Failed  string    // why the newest one could not be sent; empty if it was
}

// maxDevices is how many browsers a person may have.
const maxDevices = 10

var push64 = base64.RawURLEncoding

// parse checks the keys of a subscription, which are hostile.
func (s Subscription) parse() (*ecdh.PublicKey, []byte, error) {
	b, err := push64.DecodeString(strings.TrimRight(s.P256DH, "="))
	if err != nil {
		return nil, nil, fmt.Errorf("%w: the browser's key is not base64url", ErrInvalid)
	}
	key, err := ecdh.P256().NewPublicKey(b)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: the browser's key is not a point on P-256", ErrInvalid)
	}
	secret, err := push64.DecodeString(strings.TrimRight(s.Auth, "="))
	if err != nil || len(secret) != 16 {
		return nil, nil, fmt.Errorf("%w: the browser's secret does not have 16 bytes", ErrInvalid)
	}
	return key, secret, nil
}

// AddDevice registers a browser of who for push messages.
func (n *Notifier) AddDevice(ctx context.Context, who auth.Principal, sub Subscription, name string) error {
	if n.conf.Box == nil {
		return ErrOff
	}
	if who.Kind != auth.Person || who.Operator {
		return fmt.Errorf("%s has no browser for push messages: %w", who, auth.ErrForbidden)
	}
	if _, _, err := sub.parse(); err != nil {
		return err
	}
	if err := checkPublicURL(sub.Endpoint, n.conf.Private); err != nil {
		return fmt.Errorf("%w: the address of the push service %w", ErrInvalid, err)
	}
	u, err := url.Parse(sub.Endpoint)
	if err != nil {
		return fmt.Errorf("%w: the address of the push service is not a URL", ErrInvalid)
	}
	plain, err := json.Marshal(sub)
	if err != nil {
		return fmt.Errorf("add device: %w", err)
	}
	d := Device{ID: "dev_" + rand.Text(), Name: mail.Printable(or(strings.TrimSpace(name), "a browser"), 100), Host: u.Hostname(), Created: time.Now()}
	sum := sha256.Sum256([]byte(sub.Endpoint))
	err = n.db.Update(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, who.ID)
		if err != nil {
			return err
		}
		// A browser belongs to the person who registered it last.
		if _, err := tx.ExecContext(ctx, `delete from push_device where endpoint = $1`, hex.EncodeToString(sum[:])); err != nil {
			return err
		}
		var have int
		if err := tx.One(ctx, `select count(*) from push_device where person_id = $1`, []any{p.id}, &have); err != nil {
			return err
		}
		if have >= maxDevices {
			return fmt.Errorf("%w: you have %d browsers already; remove one first", ErrInvalid, have)
		}
		_, err = tx.ExecContext(ctx, `insert into push_device (id, person_id, endpoint, secret, name, host, created_at, sent_at, failed) values ($1, $2, $3, $4, $5, $6, $7, 0, '')`,
			d.ID, p.id, hex.EncodeToString(sum[:]), n.conf.Box.Seal(plain, "device", p.id, d.ID), d.Name, d.Host, store.Time(d.Created))
		if err != nil {
			return err
		}
		return audit.Append(ctx, tx, who, audit.NotifyDevice, p.ID, audit.Fields{"device": d.ID, "name": d.Name, "host": d.Host})
	})
	if err != nil {
		return fmt.Errorf("add device: %w", err)
	}
	return nil
}

// Devices returns who's browsers, the newest first.
func (n *Notifier) Devices(ctx context.Context, who auth.Principal) (out []Device, err error) {
	err = n.db.View(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, who.ID)
		if err != nil {
			return err
		}
		out, err = store.List(ctx, tx, func(row func(...any) error) (d Device, err error) {
			var at, sent int64
			err = row(&d.ID, &d.Name, &d.Host, &at, &sent, &d.Failed)
			d.Created, d.Sent = store.FromTime(at), store.FromTime(sent)
			return d, err
		}, `select id, name, host, created_at, sent_at, failed from push_device where person_id = $1 order by created_at desc, id`, p.id)
		return err
	})
	if errors.Is(err, store.ErrNotFound) { // the operator at the machine
		return nil, nil
	}
	return out, err
}

// RemoveDevice ends push messages to a browser of who.
func (n *Notifier) RemoveDevice(ctx context.Context, who auth.Principal, id string) error {
	err := n.db.Update(ctx, func(tx *store.Tx) error {
		p, err := named(ctx, tx, who.Project, who.ID)
		if err != nil {
			return err
		}
		ok, err := tx.Changed(ctx, `delete from push_device where id = $1 and person_id = $2`, id, p.id)
		if err != nil || !ok {
			return errors.Join(err, store.ErrNotFound)
		}
		return audit.Append(ctx, tx, who, audit.NotifyDeviceRemove, p.ID, audit.Fields{"device": id})
	})
	if err != nil {
		return fmt.Errorf("remove device: %w", err)
	}
	return nil
}

// A pushMessage is the payload that the service worker reads. The worker shows it and
// opens URL after a click; it cannot decide.
type pushMessage struct {
	Title string `json:"title"`
	Body  string `json:"body"`
	URL   string `json:"url"` // a path of the console
	Tag   string `json:"tag"` // a later message with the same tag replaces this one
}

// maxPush bounds the text, so that a message fits the 4096 bytes of a push service.
const maxPush = 1500

// pushFor returns the message for p. It only says that something waits, unless the person
// has chosen details: a locked phone shows the message to everybody.
func pushFor(p outgoing) pushMessage {
	m := pushMessage{Title: "Postern", Body: "1 action waits", URL: "/console/review", Tag: "postern"}
	if p.others > 0 {
		m.Body = plural(p.others) + " wait"
		return m
	}
	m.URL, m.Tag = "/console/actions/"+p.action.ID, p.action.ID
	if p.detail {
		var b strings.Builder
		for _, f := range actionFields(p.action) {
			fmt.Fprintf(&b, "%s: %s\n", f.name, f.value)
		}
		m.Title, m.Body = headline(p), truncate(strings.TrimSpace(b.String()), maxPush)
	}
	return m
}

// sendPush sends p to each browser of its person. The result is sent if at least one
// browser has it.
func (n *Notifier) sendPush(ctx context.Context, p outgoing) result {
	keep := 24 * time.Hour
	if !p.action.Expires.IsZero() {
		keep = min(keep, time.Until(p.action.Expires))
	}
	return n.pushTo(ctx, p.to, pushFor(p), keep, p.others == 0 && grave(p.action))
}

func (n *Notifier) pushTo(ctx context.Context, to person, m pushMessage, keep time.Duration, urgent bool) result {
	type stored struct {
		id     string
		sealed []byte
	}
	var devices []stored
	err := n.db.View(ctx, func(tx *store.Tx) (err error) {
		devices, err = store.List(ctx, tx, func(row func(...any) error) (d stored, err error) {
			err = row(&d.id, &d.sealed)
			return d, err
		}, `select id, secret from push_device where person_id = $1 order by id`, to.id)
		return err
	})
	if err != nil {
		return result{state: "waiting", err: err}
	}
	key, err := n.pushKey(ctx)
	if err != nil {
		return result{state: "waiting", err: err}
	}
	plain, err := json.Marshal(m)
	if err != nil {
		return result{state: "failed", err: err}
	}
	// Send to all at once: a slow push service delays no other browser.
	results := make([]result, len(devices))
	var all sync.WaitGroup
	for i, d := range devices {
		all.Go(func() {
			var r result
			var gone bool
			if b, err := n.conf.Box.Open(d.sealed, "device", to.id, d.id); err != nil {
				r = result{state: "failed", err: err} // its row was moved or changed
			} else {
				var sub Subscription
				_ = json.Unmarshal(b, &sub) // parse rejects missing fields
				clear(b)
				r, gone = n.pushOnce(ctx, key, sub, plain, m.Tag, keep, urgent)
			}
			n.noteDevice(ctx, d.id, r, gone)
			results[i] = r
		})
	}
	all.Wait()
	best := result{state: "failed", err: errNoAddress}
	for _, r := range results {
		// Once one browser has the message, it is not sent again for the others: they
		// get the next notice, and the reminder.
		if r.state == "sent" || best.state == "failed" {
			best = r
		}
	}
	return best
}

// noteDevice records the result of a message to a browser, and deletes a browser that is gone.
func (n *Notifier) noteDevice(ctx context.Context, id string, r result, gone bool) {
	why, at := "", time.Time{}
	if r.state == "sent" {
		at = time.Now()
	}
	if r.err != nil {
		why = mail.Printable(r.err.Error(), 200)
	}
	err := n.db.Update(context.WithoutCancel(ctx), func(tx *store.Tx) error {
		if gone {
			_, err := tx.ExecContext(ctx, `delete from push_device where id = $1`, id)
			return err
		}
		_, err := tx.ExecContext(ctx, `update push_device set failed = $1, sent_at = case when $2 > sent_at then $2 else sent_at end where id = $3`, why, store.Time(at), id)
		return err
	})
	if err != nil {
		n.log.WarnContext(ctx, "record push", "device", id, "err", err)
	}
}

// pushOnce sends one message to one browser. gone means that the browser has ended its
// subscription.
func (n *Notifier) pushOnce(ctx context.Context, key *vapidKey, sub Subscription, plain []byte, tag string, keep time.Duration, urgent bool) (r result, gone bool) {
	u, err := url.Parse(sub.Endpoint)
	if err != nil {
		return result{state: "failed", err: errors.New("the address of the push service is not a URL")}, false
	}
	public, secret, err := sub.parse()
	if err != nil {
		return result{state: "failed", err: err}, false
	}
	body, err := encryptPush(plain, public, secret)
	if err != nil {
		return result{state: "failed", err: err}, false
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, sub.Endpoint, strings.NewReader(string(body)))
	if err != nil {
		return result{state: "failed", err: errors.New("the address of the push service is not a URL")}, false
	}
	token, err := key.token(u.Scheme+"://"+u.Host, n.pushContact(), time.Now())
	if err != nil {
		return result{state: "failed", err: err}, false
	}
	topic := sha256.Sum256([]byte(tag))
	h := req.Header
	h.Set("Authorization", "vapid t="+token+", k="+key.public())
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Encoding", "aes128gcm")
	h.Set("TTL", strconv.Itoa(max(int(keep.Seconds()), 60)))
	h.Set("Topic", push64.EncodeToString(topic[:24])) // a later message with this tag replaces one that is not delivered yet
	h.Set("Urgency", map[bool]string{true: "high", false: "normal"}[urgent])
	resp, err := n.out.Do(req)
	if err != nil {
		return notSent(err), false
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, 4<<10)
	if resp.StatusCode == http.StatusNotFound || resp.StatusCode == http.StatusGone {
		return result{state: "failed", err: errors.New("the browser has ended its subscription")}, true
	}
	return byStatus(resp, "the push service"), false
}

// pushContact returns the address at which a push service can reach this server's operator.
func (n *Notifier) pushContact() string {
	if n.from.Addr != "" {
		return "mailto:" + n.from.Addr
	}
	if strings.HasPrefix(n.conf.Base, "https://") {
		return n.conf.Base
	}
	return "mailto:postern@localhost.invalid"
}
