package mailbox_test

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hpke"
	"crypto/sha256"
	"errors"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"postern/internal/auth"
	"postern/internal/directory"
	"postern/internal/keyring"
	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/policy"
	"postern/internal/seal"
	"postern/internal/store"
	"postern/internal/storetest"
)

func (f *fixture) blobCount(t *testing.T) (n int) {
	t.Helper()
	err := filepath.WalkDir(f.blobs, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestLife: an inbox from its making over its deletion and return to its end,
// after which nothing of it is left but that it was.
func TestLife(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		other, _, otherKey := f.inbox(t, "other")
		f.incoming(t, other, "stays")
		stays := f.blobCount(t)
		b, who, key := f.inbox(t, "analyst")
		for range 3 {
			f.incoming(t, b, "one")
		}
		_, k := f.show(t, key, "")
		must(f.post.Keys.Grant(ctx, who, k, keyring.NewKey{Expires: time.Now().Add(time.Hour)}))(t)

		if _, err := f.post.Delete(ctx, f.other, b.ID); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("another project deletes: %v", err)
		}
		d, err := f.post.Delete(ctx, who, "") // its own key may
		if err != nil || d.Deleted.IsZero() || d.Purge.Sub(d.Deleted) != mailbox.Grace {
			t.Fatalf("Delete = %+v, %v", d, err)
		}
		f.refused(t, key, "", directory.ErrNoInbox)
		if err := f.post.Accepts(ctx, b.Address); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("a deleted inbox takes mail: %v", err)
		}
		if _, err := f.post.Address(ctx, who, ""); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("a deleted inbox sends: %v", err)
		}
		if _, _, err := f.post.CreateInbox(ctx, f.project, directory.NewInbox{Address: "analyst"}, ""); !errors.Is(err, directory.ErrTaken) {
			t.Errorf("its address is free: %v", err)
		}
		if list, err := f.post.Deleted(ctx, f.person); err != nil || len(list) != 1 || list[0].ID != b.ID {
			t.Errorf("deleted = %+v, %v", list, err)
		}
		if _, err := f.post.Undelete(ctx, who, ""); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a deleted inbox's key brings it back: %v", err)
		}
		if err := f.post.Expire(ctx); err != nil { // within the grace
			t.Fatal(err)
		}
		if _, err := f.post.Undelete(ctx, f.project, strings.ToUpper(b.Address)); err != nil {
			t.Fatal(err)
		}
		f.reads(t, key, "", "one one one")

		// Its end comes by itself, at once for who asks and later for the rest.
		soon := time.Now().Add(time.Hour)
		if _, err := f.post.Update(ctx, who, "", mailbox.Change{Expires: &soon}); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("an agent prolongs its life: %v", err)
		}
		if _, err := f.post.Update(ctx, f.project, b.ID, mailbox.Change{Expires: &soon}); err != nil {
			t.Fatal(err)
		}
		f.exec(t, `update inbox set expires_at = 1 where id = $1`, b.ID)
		f.refused(t, key, "", directory.ErrNoInbox)
		if err := f.post.Expire(ctx); err != nil {
			t.Fatal(err)
		}
		if n := f.count(t, `select count(*) from inbox where id = $1 and deleted_at > 0`, b.ID); n != 1 {
			t.Error("an expired inbox is not deleted")
		}
		// The grace is over. A run that is killed in between leaves it to the next.
		f.exec(t, `update inbox set purge_at = 1 where id = $1`, b.ID)
		if _, err := f.post.Undelete(ctx, f.project, b.ID); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("brought back after its time: %v", err)
		}
		f.exec(t, `delete from inbox_wrap where inbox_id = $1`, b.ID) // killed after the keys
		if err := f.post.Expire(ctx); err != nil {
			t.Fatal(err)
		}
		for _, table := range f.tables(t, "inbox_id") {
			if n := f.count(t, `select count(*) from `+table+` where inbox_id = $1`, b.ID); n != 0 && !keptTables[table] {
				t.Errorf("%d rows of %s are left", n, table)
			}
		}
		if n := f.count(t, `select count(*) from inbox where id = $1`, b.ID); n != 0 {
			t.Error("the inbox is left")
		}
		if n := f.blobCount(t); n != stays {
			t.Errorf("%d blobs are left, want %d", n, stays)
		}
		if n := f.count(t, `select count(*) from credential where inbox_id = $1 and revoked_at = 0`, b.ID); n != 0 {
			t.Errorf("%d keys are left", n)
		}
		f.refused(t, key, "", auth.ErrUnauthenticated)
		f.reads(t, otherKey, "", "stays")

		// Its address is nobody else's: mail for the former owner still comes.
		if _, _, err := f.post.CreateInbox(ctx, f.other, directory.NewInbox{Address: "analyst"}, ""); !errors.Is(err, directory.ErrTaken) {
			t.Errorf("another project gets the address: %v", err)
		}
		again, _, err := f.post.CreateInbox(ctx, f.project, directory.NewInbox{Address: "analyst"}, "")
		if err != nil || again.ID == b.ID {
			t.Errorf("its own project does not get the address: %v", err)
		}
	})
}

// keptTables have rows that name an inbox and outlive it: what was decided on,
// what happened, and that the address was somebody's. None holds what arrived.
var keptTables = map[string]bool{
	"action": true, "waiting": true, "delivery": true, "suppression": true, "event": true, "event_number": true, "credential": true, "sandbox": true, "former_address": true, "run": true,
}

// tables returns the tables that have a column, or all if it is empty.
func (f *fixture) tables(t *testing.T, column string) (out []string) {
	t.Helper()
	err := f.db.View(t.Context(), func(tx *store.Tx) error {
		query := `select distinct table_name from information_schema.columns where (column_name = $1 or $1 = '') and table_schema = current_schema()`
		if strings.HasSuffix(t.Name(), "/sqlite") {
			query = `select distinct m.name from sqlite_master m join pragma_table_info(m.name) p on p.name = $1 or $1 = '' where m.type = 'table'`
		}
		rows, err := tx.QueryContext(t.Context(), query, column)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			var name string
			if err := rows.Scan(&name); err != nil {
				return err
			}
			out = append(out, name)
		}
		return rows.Err()
	})
	if err != nil || len(out) < 5 {
		t.Fatalf("tables = %v, %v", out, err)
	}
	return out
}

// TestHoldings fails for a table that has a column inbox_id and is neither
// emptied when an inbox goes nor kept on purpose.
func TestHoldings(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db)
		emptied := mailbox.Emptied()
		for _, table := range f.tables(t, "inbox_id") {
			if emptied[table] == keptTables[table] {
				t.Errorf("table %s: name it in holdings (expiry.go), or here in keptTables if its rows may outlive an inbox", table)
			}
		}
	})
}

// TestPurgeAtOnce: several processes may purge the same.
func TestPurgeAtOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		for _, name := range []string{"alice", "bella", "clara"} {
			b, _, _ := f.inbox(t, name)
			f.incoming(t, b, "one")
			f.exec(t, `update inbox set deleted_at = 1, purge_at = 1 where id = $1`, b.ID)
		}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if err := f.post.Expire(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n := f.count(t, `select count(*) from audit_entry where verb = 'inbox.purge'`); n != 3 {
			t.Errorf("%d purges are on the record, want 3", n)
		}
		if n := f.blobCount(t) + f.count(t, `select count(*) from inbox`) + f.count(t, `select count(*) from inbox_key`); n != 0 {
			t.Errorf("%d things are left", n)
		}
	})
}

func TestUpdate(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, who, _ := f.inbox(t, "analyst")
		str := func(s string) *string { return &s }
		num := func(n int64) *int64 { return &n }
		at := func(d time.Duration) *time.Time { u := time.Now().Add(d); return &u }
		for _, tt := range []struct {
			name string
			who  auth.Principal
			c    mailbox.Change
			want error
		}{
			{"its name, by its key", who, mailbox.Change{DisplayName: str("Zoë, Sales")}, nil},
			{"nothing", f.project, mailbox.Change{}, nil},
			{"its room", f.person, mailbox.Change{MaxBytes: num(1000)}, nil},
			{"its room, by its key", who, mailbox.Change{MaxBytes: num(1 << 30)}, auth.ErrForbidden},
			{"too much room", f.person, mailbox.Change{MaxBytes: num(1 << 40)}, directory.ErrInvalid},
			{"no room", f.person, mailbox.Change{MaxBytes: num(0)}, directory.ErrInvalid},
			{"a past end", f.person, mailbox.Change{Expires: at(-time.Second)}, directory.ErrInvalid},
			{"no end", f.person, mailbox.Change{Expires: &time.Time{}}, nil},
			{"an address for a name", f.person, mailbox.Change{DisplayName: str("boss@bank.example")}, directory.ErrInvalid},
			{"a quotation", f.person, mailbox.Change{DisplayName: str(`a" <x>`)}, directory.ErrInvalid},
			{"a line break", f.person, mailbox.Change{DisplayName: str("a\r\nBcc: x")}, directory.ErrInvalid},
			{"a hidden character", f.person, mailbox.Change{DisplayName: str("a\u200bb")}, directory.ErrInvalid},
			{"too long", f.person, mailbox.Change{DisplayName: str(strings.Repeat("ä", 101))}, directory.ErrInvalid},
			{"another project", f.other, mailbox.Change{DisplayName: str("x")}, directory.ErrNoInbox},
		} {
			t.Run(tt.name, func(t *testing.T) {
				if _, err := f.post.Update(ctx, tt.who, b.ID, tt.c); !errors.Is(err, tt.want) {
					t.Errorf("got %v, want %v", err, tt.want)
				}
			})
		}
		got, err := f.post.Directory.Find(ctx, f.project, b.ID)
		if err != nil || got.DisplayName != "Zoë, Sales" || got.MaxBytes != 1000 || !got.Expires.IsZero() {
			t.Errorf("inbox = %+v, %v", got, err)
		}
		// A full inbox takes no more.
		f.incoming(t, b, "one")
		if err := f.receive(t, b, strings.Repeat("x", 2000)); !errors.Is(err, mailbox.ErrFull) {
			t.Errorf("over its room: %v", err)
		}
	})
}

func TestNames(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		make := func(n directory.NewInbox) (string, error) {
			b, _, err := f.post.CreateInbox(ctx, f.project, n, "")
			return strings.TrimSuffix(b.Address, "@agents.test"), err
		}
		for _, tt := range []struct{ name, text, want string }{
			{"words", "Sarah Shield", "sarah-shield"},
			{"marks", "Zoë's Sales-Bot!", "zoes-sales-bot"},
			{"umlauts", "Jürgen Groß", "juergen-gross"},
			{"full width", "Ｄａｔａ Ｂｏｔ", "data-bot"},
			{"an ampersand", "Ben & Ann", "ben-and-ann"},
			{"short", "Al", "al-agent"},
			{"a reserved one", "Postmaster", "postmaster-agent"},
			{"spaces", "  a   b  ", "a-b"},
			{"long", strings.Repeat("word ", 15), "word-word-word-word-word-word-word-word"},
		} {
			if got, err := make(directory.NewInbox{DisplayName: tt.text}); err != nil || got != tt.want {
				t.Errorf("%s: got %q, %v; want %q", tt.name, got, err, tt.want)
			}
		}
		for _, text := range []string{"", "日本語", "💌", "!!!"} {
			if got, err := make(directory.NewInbox{DisplayName: text}); err != nil || strings.Count(got, "-") != 2 {
				t.Errorf("%q: got %q, %v; want a drawn name", text, got, err)
			}
		}
		// What is taken is told with what is free, or passed over.
		if got, err := make(directory.NewInbox{DisplayName: "Sarah Shield"}); err != nil || !strings.HasPrefix(got, "sarah-shield-") {
			t.Errorf("the next by itself: got %q, %v", got, err)
		}
		if got, err := make(directory.NewInbox{Address: "sarah-shield", Next: true}); err != nil || !strings.HasPrefix(got, "sarah-shield-") {
			t.Errorf("the next when asked: got %q, %v", got, err)
		}
		_, err := make(directory.NewInbox{Address: "Sarah-Shield@Agents.Test"})
		taken, ok := errors.AsType[*directory.TakenError](err)
		if !ok || len(taken.Suggestions) == 0 {
			t.Fatalf("taken: %v", err)
		}
		if got, err := make(directory.NewInbox{Address: taken.Suggestions[0]}); err != nil || got+"@agents.test" != taken.Suggestions[0] {
			t.Errorf("a suggestion is not free: %q, %v", got, err)
		}
		for _, name := range []string{"postmaster", "Post.Master", "post-master", "postmaster1", "abuse", "hostmaster", "admin", "sslwebmaster", "mta-sts", "mailer-daemon", "noreply", "no_reply", "root", "www", "api", "info", "sales"} {
			if got, err := make(directory.NewInbox{Address: name}); !errors.Is(err, directory.ErrInvalid) {
				t.Errorf("%s: %q, %v; want ErrInvalid", name, got, err)
			}
		}
	})
}

// TestOperated: reserved names are an owner's to make, in the server's domain and
// no other that is not proved, and no program's; and no sandbox that is attached
// to one by which a domain is proved writes from it. Who may not is told who may.
func TestOperated(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		b, key, err := f.post.CreateInbox(ctx, f.person, directory.NewInbox{Address: "Postmaster"}, "")
		if err != nil || b.Address != "postmaster@agents.test" {
			t.Fatalf("a person: %q, %v", b.Address, err)
		}
		if err := f.post.Accepts(ctx, "PostMaster@agents.test"); err != nil {
			t.Errorf("mail for it: %v", err)
		}
		if err := f.post.Accepts(ctx, "abuse@agents.test"); !errors.Is(err, directory.ErrNoInbox) {
			t.Errorf("mail for what nobody has made: %v", err)
		}
		f.incoming(t, b, "one")
		f.reads(t, key, "", "one")
		agent, _ := f.show(t, key, "")
		for name, tt := range map[string]struct {
			who     auth.Principal
			address string
			want    error
		}{
			"a project's key":           {f.project, "abuse", directory.ErrReserved},
			"an inbox's key":            {agent, "abuse", auth.ErrForbidden},
			"a sandbox":                 {auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.project.Project}, "abuse", auth.ErrForbidden},
			"what looks like it":        {f.person, "post-master", directory.ErrReserved},
			"what mail servers use":     {f.person, "mailer-daemon", directory.ErrReserved},
			"a key, a role":             {f.project, "support", directory.ErrReserved},
			"a domain that is not ours": {f.person, "abuse@example.com", directory.ErrInvalid},
			"what is there":             {f.person, "postmaster", directory.ErrTaken},
		} {
			if got, _, err := f.post.CreateInbox(ctx, tt.who, directory.NewInbox{Address: tt.address}, ""); !errors.Is(err, tt.want) {
				t.Errorf("%s: %q, %v; want %v", name, got.Address, err, tt.want)
			}
		}
		for _, name := range []string{"hostmaster", "admin", "webmaster", "info", "support"} {
			if b, _, err := f.post.CreateInbox(ctx, f.person, directory.NewInbox{Address: name}, ""); err != nil || b.Address != name+"@agents.test" {
				t.Errorf("an owner makes %s: %q, %v", name, b.Address, err)
			}
		}
		if _, _, err := f.post.CreateInbox(ctx, f.project, directory.NewInbox{Address: "admin"}, ""); err == nil || !strings.Contains(err.Error(), "an owner can create it") || !strings.Contains(err.Error(), "postern inbox create admin") {
			t.Errorf("a key is told %v, want who may and how", err)
		}
		box := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.project.Project, Inbox: b.ID}
		draft := mailbox.Outgoing{Draft: mail.Draft{To: []string{"bob@example.com"}, Text: "x"}}
		if _, err := f.post.Send(ctx, box, "mcp", draft); !errors.Is(err, auth.ErrForbidden) {
			t.Errorf("a sandbox writes as postmaster: %v", err)
		}
		if _, err := f.post.Send(ctx, agent, "rest", draft); err != nil {
			t.Errorf("its key proposes: %v", err)
		}
	})
}

// TestKeyOfBefore: a key from before credentials had key pairs opens what it
// opened, gets its key pair when it is shown, and is re-keyed like any other.
func TestKeyOfBefore(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		ctx := t.Context()
		f := setup(t, db)
		private, err := hpke.MLKEM768X25519().GenerateKey()
		if err != nil {
			t.Fatal(err)
		}
		b := directory.Inbox{ID: "ibx_OLDOLDOLDOLD", Address: "oldest@agents.test"}
		public := private.PublicKey().Bytes()
		f.exec(t, `insert into inbox (id, project_id, address, mode, public_key, created_at) values ($1, $2, $3, $4, $5, 1)`, b.ID, f.project.Project, b.Address, policy.GatedSend, public)
		f.exec(t, `insert into inbox_epoch (inbox_id, epoch, public_key, created_at) values ($1, 1, $2, 1)`, b.ID, public)
		f.exec(t, `insert into inbox_use (inbox_id, bytes) values ($1, 0)`, b.ID)
		var id string
		var key auth.Secret
		err = db.Update(ctx, func(tx *store.Tx) error {
			id, key, err = auth.NewCredential(ctx, tx, auth.Credential{Project: f.project.Project, Kind: auth.Agent, Inbox: b.ID})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		f.exec(t, `insert into inbox_key (inbox_id, credential_id) values ($1, $2)`, b.ID, id)
		f.exec(t, `insert into inbox_wrap (inbox_id, credential_id, epoch, wrapped) values ($1, $2, 1, $3)`, b.ID, id, wrapAsBefore(t, private, key, b.ID, id))

		f.incoming(t, b, "one")
		f.reads(t, key, "", "one")
		f.reads(t, key, "", "one") // by its key pair now
		if n := f.count(t, `select length(public_key) from inbox_key where credential_id = $1`, id); n == 0 {
			t.Error("it has no key pair after it was shown")
		}
		who, k := f.show(t, key, "")
		p, _ := must(f.post.Keys.Add(ctx, who, k, keyring.NewKey{Scope: seal.Read}))(t)
		if err := f.post.Keys.Revoke(ctx, who, "", p.Credential, false); err != nil {
			t.Fatal(err)
		}
		f.incoming(t, b, "two")
		f.reads(t, key, "", "two one")
	})
}

// wrapAsBefore wraps as version 1 did.
func wrapAsBefore(t *testing.T, private hpke.PrivateKey, credential auth.Secret, inbox, id string) []byte {
	t.Helper()
	secret, err1 := private.Bytes()
	key, err2 := hkdf.Key(sha256.New, []byte(credential.Reveal()), []byte(id), "postern inbox key v1\x00"+inbox, 32)
	block, err3 := aes.NewCipher(key)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	c, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		t.Fatal(err)
	}
	return c.Seal(nil, nil, secret, nil)
}

// TestRunExpiry: it ends what is due at once, and itself with its context.
func TestRunExpiry(t *testing.T) {
	f := setup(t, storetest.SQLite(t))
	b, _, _ := f.inbox(t, "analyst")
	f.exec(t, `update inbox set expires_at = 1 where id = $1`, b.ID)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- f.post.RunExpiry(ctx) }()
	for start := time.Now(); f.count(t, `select count(*) from inbox where deleted_at > 0`) == 0; time.Sleep(10 * time.Millisecond) {
		if time.Since(start) > 2*time.Minute {
			t.Fatal("it does nothing")
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
