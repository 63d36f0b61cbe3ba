package webhook

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"postern/internal/audit"
	"postern/internal/auth"
	"postern/internal/publicnet"
	"postern/internal/store"
)

// lease is how long a server has a delivery that it took. After that the server is
// considered dead, and another one retries.
func (h *Hooks) lease() time.Duration { return h.conf.Timeout + 20*time.Second }

// Run routes events and sends deliveries until ctx is done, and returns when the
// attempts under way have ended. Several servers of one database may run it.
func (h *Hooks) Run(ctx context.Context) error {
	defer h.sending.Wait()
	t := time.NewTicker(250 * time.Millisecond)
	defer t.Stop()
	var pruned time.Time
	for {
		n, err := h.route(ctx)
		if err == nil {
			err = h.dispatch(ctx)
		}
		if err == nil && time.Since(pruned) > time.Hour {
			pruned = time.Now()
			err = h.prune(ctx)
		}
		if err != nil && ctx.Err() == nil {
			h.log.ErrorContext(ctx, "deliver to webhooks", "err", err)
			n = 0
		}
		if n > 0 && ctx.Err() == nil { // there may be more
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-t.C:
		}
	}
}

// A attempt is a delivery that was taken, with what it needs.
type attempt struct {
	id, webhook, event, url, body string

	inbox   string
	dialect Dialect
	sealed  []byte // the secret
	old     []byte // the one before, while that is valid too
	attempt int    // this one's number
	left    int    // attempts after this one
}

// dispatch starts attempts of due deliveries while there are slots. The limit for
// each webhook keeps a slow receiver from delaying others.
func (h *Hooks) dispatch(ctx context.Context) error {
	var due []string
	err := h.db.View(ctx, func(tx *store.Tx) (err error) {
		due, err = tx.Strings(ctx, `select distinct webhook_id from webhook_delivery where next_at > 0 and next_at <= $1`, store.Time(time.Now()))
		return err
	})
	if err != nil {
		return fmt.Errorf("find due deliveries: %w", err)
	}
	rand.Shuffle(len(due), func(i, j int) { due[i], due[j] = due[j], due[i] }) //nolint:gosec // nobody gains by guessing
	for _, id := range due {
		for h.acquireSlot(id) {
			p, err := h.take(ctx, id)
			if err != nil {
				h.releaseSlot(id)
				if errors.Is(err, store.ErrNotFound) {
					break
				}
				return fmt.Errorf("take delivery: %w", err)
			}
			h.sending.Go(func() {
				defer h.releaseSlot(id)
				ctx := context.WithoutCancel(ctx) // an attempt under way is completed
				if err := h.makeAttempt(ctx, p); err != nil {
					// It is retried when the lease has expired.
					h.log.ErrorContext(ctx, "deliver to webhook", "webhook", p.webhook, "delivery", p.id, "err", err)
				}
			})
		}
	}
	return nil
}

// acquireSlot takes a slot for an attempt of the webhook id, if one is free for it
// and in all.
func (h *Hooks) acquireSlot(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := 0
	for _, n := range h.active {
		all += n
	}
	if all >= maxAtOnce || h.active[id] >= maxEach {
		return false
	}
	h.active[id]++
	return true
}

// releaseSlot frees a slot that acquireSlot took.
func (h *Hooks) releaseSlot(id string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.active[id]--; h.active[id] <= 0 {
		delete(h.active, id)
	}
}

// take leases the oldest due delivery of a webhook and counts the attempt before it
// is made. It returns [store.ErrNotFound] if none is due.
func (h *Hooks) take(ctx context.Context, webhook string) (p attempt, err error) {
	err = h.db.Update(ctx, func(tx *store.Tx) error {
		now := time.Now()
		// Under PostgreSQL a second server may choose the same row. It then waits for
		// the first one's commit and matches no row.
		err := tx.One(ctx, `update webhook_delivery set attempts = attempts + 1, left_over = left_over - 1, next_at = $1, last_at = $2
			where id = (select id from webhook_delivery where webhook_id = $3 and next_at > 0 and next_at <= $2 order by next_at, id limit 1) and next_at > 0 and next_at <= $2
			returning id, webhook_id, event_id, inbox_id, body, attempts, left_over`,
			[]any{store.Time(now.Add(h.lease())), store.Time(now), webhook}, &p.id, &p.webhook, &p.event, &p.inbox, &p.body, &p.attempt, &p.left)
		if err != nil {
			return err
		}
		var w Webhook
		var until int64
		err = tx.One(ctx, `select project_id, inbox_id, credential_id, url, dialect, secret, old_secret, old_until, waits from webhook where id = $1`,
			[]any{webhook}, &w.Project, &w.Inbox, &w.Credential, &p.url, &p.dialect, &p.sealed, &p.old, &until, &w.Waits)
		if err != nil {
			return err
		}
		if w.Waits != "" { // proposeURL has abandoned it; this is the last check before a request leaves
			left := p.id
			p = attempt{}
			_, err := tx.ExecContext(ctx, `update webhook_delivery set state = $1, next_at = 0, left_over = 0, error = $2 where id = $3`, Failed, "the URL of the webhook waits for approval", left)
			return err
		}
		w.ID = webhook
		// It may have waited for hours, and the key may have been revoked since.
		if may, err := mayReceive(ctx, tx, &w, p.inbox); err != nil {
			return err
		} else if !may {
			left := p.id
			p = attempt{}
			_, err := tx.ExecContext(ctx, `update webhook_delivery set state = $1, next_at = 0, left_over = 0, error = $2 where id = $3`, Failed, errKeyEnded.Error(), left)
			return err
		}
		if until <= store.Time(now) {
			p.old = nil
		}
		return nil
	})
	if err == nil && p.id == "" {
		err = store.ErrNotFound
	}
	return p, err
}

// makeAttempt sends p once and records what became of it.
func (h *Hooks) makeAttempt(ctx context.Context, p attempt) error {
	var secrets []auth.Secret // the present one first
	for _, sealed := range [][]byte{p.sealed, p.old} {
		if sealed == nil {
			continue
		}
		secret, err := h.seal.open(p.webhook, sealed)
		if err != nil {
			return h.recordAttempt(ctx, p, 0, 0, err)
		}
		secrets = append(secrets, secret)
	}
	start := time.Now()
	status, err := h.send(ctx, p, secrets)
	return h.recordAttempt(ctx, p, status, time.Since(start), err)
}

// send makes one request. The error is for the person who created the webhook.
func (h *Hooks) send(ctx context.Context, p attempt, secrets []auth.Secret) (status int, err error) {
	b, headers := p.signed(secrets, time.Now())
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, p.url, bytes.NewReader(b))
	if err != nil {
		return 0, errors.New("the URL is invalid")
	}
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := h.client.Do(req)
	if err != nil {
		return 0, explain(err)
	}
	defer resp.Body.Close()
	_, _ = io.CopyN(io.Discard, resp.Body, maxAnswer) // so that the connection can be reused
	switch {
	case resp.StatusCode >= 200 && resp.StatusCode < 300:
		return resp.StatusCode, nil
	case resp.StatusCode >= 300 && resp.StatusCode < 400:
		return resp.StatusCode, fmt.Errorf("the receiver answered %d; redirects are not followed", resp.StatusCode)
	}
	return resp.StatusCode, fmt.Errorf("the receiver answered %d", resp.StatusCode)
}

// signed returns the body and the headers of p's request, with a signature by each
// of secrets.
func (p *attempt) signed(secrets []auth.Secret, now time.Time) (b []byte, headers map[string]string) {
	b = []byte(p.body)
	headers = map[string]string{"Content-Type": "application/json", "User-Agent": "Postern-Webhooks/1"}
	if p.inbox == "" {
		var e2b string
		e2b, b = e2bSignature(secrets[0], b)
		headers["e2b-webhook-id"], headers["e2b-delivery-id"] = p.webhook, p.id+"."+strconv.Itoa(p.attempt)
		headers["e2b-signature-version"], headers["e2b-signature"] = "v1", e2b
	}
	switch p.dialect {
	case Lobster:
		headers["X-LobsterMail-Signature"] = bodySignature(secrets[0], b)
	case MultiMail:
		headers["X-MultiMail-Signature"] = bodySignature(secrets[0], b)
	case Standard:
	}
	ts := strconv.FormatInt(now.Unix(), 10)
	var signatures []string
	for _, secret := range secrets {
		signatures = append(signatures, signature(secret, p.event, ts, b))
	}
	headers["webhook-id"], headers["webhook-timestamp"], headers["webhook-signature"] = p.event, ts, strings.Join(signatures, " ")
	return b, headers
}

// explain returns why there was no response, without the URL, which may contain a
// secret, and without anything that a host in a private network sent.
func explain(err error) error {
	if u, ok := errors.AsType[*url.Error](err); ok {
		err = u.Err
	}
	var dns *net.DNSError
	var op *net.OpError
	switch {
	case errors.Is(err, publicnet.ErrRefused):
		if errors.As(err, &op) {
			err = op.Err
		}
		return err
	case errors.Is(err, context.DeadlineExceeded):
		return errors.New("no answer in time")
	case errors.As(err, &dns):
		return fmt.Errorf("the name does not resolve: %s", dns.Err)
	case errors.As(err, &op) && op.Op == "dial":
		return fmt.Errorf("cannot connect: %w", op.Err)
	}
	var timeout interface{ Timeout() bool }
	if errors.As(err, &timeout) && timeout.Timeout() {
		return errors.New("no answer in time")
	}
	return fmt.Errorf("no answer: %w", err)
}

// backoff returns the wait after the nth failure: four times longer each time, with
// a jitter of a fifth so that retries do not synchronize.
func (h *Hooks) backoff(n int) time.Duration {
	d := h.conf.Retry
	for i := 1; i < n && d < 6*time.Hour; i++ {
		d *= 4
	}
	d = min(d, 6*time.Hour)
	return d*4/5 + rand.N(d*2/5+1) //nolint:gosec // nobody gains by guessing
}

// recordAttempt records the result of an attempt. A failure changes nothing if the
// delivery was abandoned, redelivered or deleted meanwhile.
func (h *Hooks) recordAttempt(ctx context.Context, p attempt, status int, took time.Duration, sent error) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	now := time.Now()
	state, next, why := Failed, int64(0), ""
	if sent != nil {
		why = sent.Error()
		if p.left > 0 && status != http.StatusGone {
			state, next = Waiting, store.Time(now.Add(h.backoff(maxAttempts-p.left)))
		}
	}
	return h.db.Update(ctx, func(tx *store.Tx) error {
		if sent == nil {
			return delivered(ctx, tx, p, status, took)
		}
		ours, err := tx.Changed(ctx, `update webhook_delivery set state = $1, next_at = $2, status = $3, duration_us = $4, error = $5
			where id = $6 and attempts = $7 and left_over = $8 and next_at > 0`,
			state, next, status, took.Microseconds(), why, p.id, p.attempt, p.left)
		if err != nil {
			return fmt.Errorf("record attempt: %w", err)
		}
		if !ours {
			return nil
		}
		return h.failed(ctx, tx, p, status, now)
	})
}

// delivered records a success, also if the delivery was abandoned meanwhile.
func delivered(ctx context.Context, tx *store.Tx, p attempt, status int, took time.Duration) error {
	if _, err := tx.ExecContext(ctx, `update webhook_delivery set state = $1, next_at = 0, status = $2, duration_us = $3, error = '' where id = $4 and attempts = $5`,
		Delivered, status, took.Microseconds(), p.id, p.attempt); err != nil {
		return fmt.Errorf("record delivery: %w", err)
	}
	_, err := tx.ExecContext(ctx, `update webhook set failing_since = 0 where id = $1 and failing_since > 0`, p.webhook)
	return err
}

// failed disables a webhook that has failed for too long, or whose receiver replied
// 410 Gone, as Standard Webhooks specifies.
func (h *Hooks) failed(ctx context.Context, tx *store.Tx, p attempt, status int, now time.Time) error {
	if _, err := tx.ExecContext(ctx, `update webhook set failing_since = $1 where id = $2 and failing_since = 0`, store.Time(now), p.webhook); err != nil {
		return err
	}
	why := "no delivery succeeded for " + h.conf.DisableAfter.String()
	since := store.Time(now.Add(-h.conf.DisableAfter))
	if status == http.StatusGone {
		why, since = "the receiver answered 410 Gone", store.Time(now)
	}
	var project string
	err := tx.One(ctx, `update webhook set enabled = $1, reason = $2 where id = $3 and enabled = $4 and failing_since <= $5 returning project_id`,
		[]any{false, why, p.webhook, true, since}, &project)
	if errors.Is(err, store.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := abandon(ctx, tx, p.webhook, "the webhook was disabled: "+why); err != nil {
		return err
	}
	who := auth.Principal{Kind: auth.System, ID: "webhook", Project: project}
	return audit.Append(ctx, tx, who, audit.WebhookDisable, p.webhook, audit.Fields{"reason": why})
}

// disable disables a webhook, with a reason for people.
func disable(ctx context.Context, tx *store.Tx, who auth.Principal, id, why string) error {
	if _, err := tx.ExecContext(ctx, `update webhook set enabled = $1, reason = $2 where id = $3`, false, why, id); err != nil {
		return fmt.Errorf("disable webhook %s: %w", id, err)
	}
	if err := abandon(ctx, tx, id, "the webhook was disabled: "+why); err != nil {
		return err
	}
	return audit.Append(ctx, tx, who, audit.WebhookDisable, id, audit.Fields{"reason": why})
}
