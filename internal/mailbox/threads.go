package mailbox

import (
	"bytes"
	"context"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"postern/internal/auth"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/message"
	"postern/internal/seal"
	"postern/internal/store"
)

// Messages are threaded as they arrive, by Message-ID, In-Reply-To and
// References (RFC 5322 3.6.4), when the server has no key of the inbox. So what
// it keeps of a Message-ID is a hash under a key that it derives for the inbox
// from its own secret: the database alone tells nothing about Message-IDs, and
// the database with the server's secret lets somebody who knows a Message-ID
// check whether it is in the inbox. Which messages belong together is in the
// clear, as their times and sizes are.
//
// The attack: a stranger who knows a Message-ID names it, and so stands in that
// thread. He cannot be kept out, since any answer does just that; therefore each
// message of a thread is shown with its own sender and its own proofs, a thread
// proves nothing, and two threads are never made one: whoever names messages of
// both joins the nearest.

// maxRefs bounds the Message-IDs of one message that count.
const maxRefs = 50

// refs returns the hashes of the Message-IDs that p names, the nearest ancestor
// first, its own last.
func (m *PostOffice) refs(inbox string, p mail.Message) [][]byte {
	key, err := hkdf.Key(sha256.New, m.cfg.Secret, []byte(inbox), "postern thread v1", 32)
	if err != nil { // unreachable: the length is one that HKDF yields
		panic(err)
	}
	ids := slices.Clone(p.InReplyTo[:min(len(p.InReplyTo), 2)]) // more than one is rare, and then the first is as good as any
	for _, id := range slices.Backward(p.References) {
		if len(ids) == maxRefs-2 {
			ids = append(ids, p.References[0]) // the root stays the root however long the thread
			break
		}
		ids = append(ids, id)
	}
	if p.MessageID != "" {
		ids = append(ids, p.MessageID)
	}
	var out [][]byte
	for _, id := range ids {
		h := hmac.New(sha256.New, key)
		h.Write([]byte(id))
		ref := h.Sum(nil)[:16]
		if !slices.ContainsFunc(out, func(r []byte) bool { return bytes.Equal(r, ref) }) {
			out = append(out, ref)
		}
	}
	return out
}

// joinThread returns the thread of a message that names refs, and makes it if there
// is none. Tx has locked the inbox.
func joinThread(ctx context.Context, tx *store.Tx, inbox string, at int64, refs [][]byte) (string, error) {
	thread := "thr_" + rand.Text()
	if len(refs) > 0 {
		known, err := knownRefs(ctx, tx, inbox, refs)
		if err != nil {
			return "", fmt.Errorf("find thread: %w", err)
		}
		for _, r := range refs {
			if t, ok := known[string(r)]; ok {
				thread = t
				break
			}
		}
		args, values := []any{inbox, thread}, []string(nil)
		for _, r := range refs {
			if _, ok := known[string(r)]; !ok {
				args = append(args, r)
				values = append(values, "($1, $"+strconv.Itoa(len(args))+", $2)")
			}
		}
		if len(values) > 0 {
			// A message may come before the one that it answers.
			_, err = tx.ExecContext(ctx, `insert into thread_ref (inbox_id, ref, thread_id) values `+strings.Join(values, ", ")+` on conflict do nothing`, args...)
			if err != nil {
				return "", fmt.Errorf("insert thread: %w", err)
			}
		}
	}
	_, err := tx.ExecContext(ctx, `insert into thread (id, inbox_id, at) values ($1, $2, $3)
		on conflict (id) do update set at = case when thread.at > excluded.at then thread.at else excluded.at end`, thread, inbox, at)
	if err != nil {
		return "", fmt.Errorf("insert thread: %w", err)
	}
	return thread, nil
}

func knownRefs(ctx context.Context, tx *store.Tx, inbox string, refs [][]byte) (map[string]string, error) {
	args := []any{inbox}
	for _, r := range refs {
		args = append(args, r)
	}
	rows, err := tx.QueryContext(ctx, `select ref, thread_id from thread_ref where inbox_id = $1 and ref in (`+store.Places(2, len(refs))+`)`, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	known := map[string]string{}
	for rows.Next() {
		var ref []byte
		var thread string
		if err := rows.Scan(&ref, &thread); err != nil {
			return nil, err
		}
		known[string(ref)] = thread
	}
	return known, rows.Err()
}

// Threads returns the threads of the inbox that k opens, the one with the
// newest message first, and the cursor of the next page, which is empty where
// there is none. Threads that are in the trash altogether are left out. A limit
// of 0 means 50.
func (m *PostOffice) Threads(ctx context.Context, who auth.Principal, k *seal.Key, limit int, cursor string) (out []message.Thread, next string, err error) {
	if err := keyring.MayOpen(who, k.Inbox()); err != nil {
		return nil, "", err
	}
	if limit <= 0 {
		limit = 50
	}
	from, err := parseCursor(cursor)
	if err != nil {
		return nil, "", err
	}
	err = m.db.View(ctx, func(tx *store.Tx) error {
		if out, err = listThreads(ctx, tx, k.Inbox(), from, limit+1); err != nil {
			return err
		}
		out, next = paged(out, limit, func(t *message.Thread) string { return position{store.Time(t.At), t.ID}.String() })
		return newest(ctx, tx, k, out)
	})
	if err != nil {
		return nil, "", fmt.Errorf("list threads: %w", err)
	}
	return out, next, nil
}

// newest opens the newest message of each thread of a page.
func newest(ctx context.Context, tx *store.Tx, k *seal.Key, page []message.Thread) error {
	if len(page) == 0 {
		return nil
	}
	args, of := []any{k.Inbox()}, map[string]*message.Thread{}
	for i := range page {
		args = append(args, page[i].ID)
		of[page[i].ID] = &page[i]
	}
	ms, err := scanMessages(ctx, tx, k, `select `+messageColumns+` from thread t join message m on m.id =
			(select n.id from message n where n.thread_id = t.id and n.inbox_id = $1 and n.trashed_at = 0 order by n.at desc, n.id desc limit 1)
		where t.id in (`+store.Places(2, len(page))+`)`, args...)
	if err != nil {
		return err
	}
	for _, msg := range ms {
		if t := of[msg.Thread]; t != nil {
			t.Newest = msg
		}
	}
	return nil
}

// listThreads reads what a page of threads shows without opening anything. Messages of a
// thread are always named by inbox and thread, as in the index message_thread: with an
// index by thread alone, SQLite read all messages of the inbox for each thread.
func listThreads(ctx context.Context, tx *store.Tx, inbox string, from position, limit int) (out []message.Thread, err error) {
	const shown = `from message m where m.thread_id = t.id and m.inbox_id = t.inbox_id and m.trashed_at = 0`
	rows, err := tx.QueryContext(ctx, `select t.id, t.at, count(*), sum(case when m.labels like '% read %' then 0 else 1 end), min(m.at)
		from (select t.id, t.inbox_id, t.at from thread t where t.inbox_id = $1 and (t.at, t.id) < ($2, $3) and exists (select 1 `+shown+`)
			order by t.at desc, t.id desc limit $4) as t
		join message m on m.thread_id = t.id and m.inbox_id = t.inbox_id and m.trashed_at = 0
		group by t.id, t.at order by t.at desc, t.id desc`, inbox, from.at, from.id, limit)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var t message.Thread
		var at, begun int64
		if err := rows.Scan(&t.ID, &at, &t.Messages, &t.Unread, &begun); err != nil {
			return nil, err
		}
		t.At, t.Begun = store.FromTime(at), store.FromTime(begun)
		out = append(out, t)
	}
	return out, rows.Err()
}

// Thread returns the messages of one thread that are not in the trash, oldest
// first: the newest 200 of them. It returns an error that wraps
// [store.ErrNotFound] if there are none.
func (m *PostOffice) Thread(ctx context.Context, who auth.Principal, k *seal.Key, id string) ([]message.Message, error) {
	ms, _, err := m.List(ctx, who, k, Listing{Thread: id, Limit: maxThread})
	if err == nil && len(ms) == 0 {
		err = store.ErrNotFound
	}
	if err != nil {
		return nil, fmt.Errorf("thread %s: %w", id, err)
	}
	slices.Reverse(ms)
	return ms, nil
}

// maxThread bounds what [PostOffice.Thread] returns.
const maxThread = 200
