package mailapi

import (
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"postern/internal/auth"
	"postern/internal/store"
	"postern/internal/storetest"
)

// owner creates the account of an owner, as client name.
func (f *fixture) owner(t *testing.T, name string) auth.Principal {
	t.Helper()
	var who auth.Principal
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		token, err := auth.NewSetup(t.Context(), tx, f.person.Project)
		if err != nil {
			return err
		}
		who, err = auth.Redeem(t.Context(), tx, token, name, "x")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return who
}

// connectCode makes a code as the operator at the machine.
func (f *fixture) connectCode(t *testing.T, body string) (id, code string) {
	t.Helper()
	f.as("operator", auth.Principal{Kind: auth.Person, Role: auth.Owner, Operator: true, ID: "local-root", Project: f.person.Project})
	got := f.do(t, "operator", "POST", "/v1/connect-codes", body)
	if got.code != 201 {
		t.Fatalf("make a code: %+v", got)
	}
	return got.field(t, "id"), got.field(t, "code")
}

func (f *fixture) redeem(t *testing.T, code string) answered {
	t.Helper()
	return f.do(t, "nobody", "POST", "/v1/connect", fmt.Sprintf(`{"code":%q}`, code))
}

// connectFrom shows a code from an address.
func (f *fixture) connectFrom(t *testing.T, remote, code string) int {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "POST", "http://postern.example/v1/connect", strings.NewReader(fmt.Sprintf(`{"code":%q}`, code)))
	r.Header.Set("Content-Type", "application/json")
	r.RemoteAddr = remote
	w := httptest.NewRecorder()
	f.srv.Handler().ServeHTTP(w, r)
	return w.Code
}

// TestConnect: a code makes one inbox with the mode and the scopes that its maker chose,
// for the first client that uses it.
func TestConnect(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		id, code := f.connectCode(t, `{"address":"helper","display_name":"Helper","mode":"gated_all","scopes":["read","send"]}`)

		// Who has the database finds no code in it.
		err := db.View(t.Context(), func(tx *store.Tx) error {
			var n int
			err := tx.One(t.Context(), `select count(*) from connect_code where hash = $1 or address = $2 or id = $2`, []any{[]byte(code), code}, &n)
			if n > 0 {
				t.Error("the code is in the database")
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}

		got := f.redeem(t, code)
		if got.code != 201 || got.field(t, "address") != "helper@agents.test" || got.field(t, "mode") != "gated_all" || got.field(t, "scopes") != "[read send]" {
			t.Fatalf("connect = %+v", got)
		}
		f.byKey("agent", auth.Secret(got.field(t, "key")))
		if me := f.do(t, "agent", "GET", "/v1/me", ""); me.code != 200 || !strings.Contains(me.body, `"address":"helper@agents.test"`) || me.field(t, "can_read") != "true" {
			t.Errorf("me = %+v", me)
		}
		// Without full it makes no key for others.
		if keys := f.do(t, "agent", "POST", "/v1/inboxes/me/keys", `{}`); keys.code != 403 {
			t.Errorf("make a key: %+v", keys)
		}

		// The second time it says so, to who shows it and to its makers; and nothing is made.
		again := f.redeem(t, code)
		if again.code != 409 || again.field(t, "error") != "connect_code_used" || strings.Contains(again.body, "pib_") {
			t.Errorf("again = %+v", again)
		}
		list := f.do(t, "person", "GET", "/v1/connect-codes", "")
		if !strings.Contains(list.body, id) || !strings.Contains(list.body, `"state":"used"`) || strings.Contains(list.body, `"tried_again_at":null`) || strings.Contains(list.body, code) {
			t.Errorf("list = %s", list.body)
		}
		record := f.do(t, "person", "GET", "/v1/audit?verb=connect", "").body
		for _, verb := range []string{"connect.create", "connect.use", "connect.again"} {
			if !strings.Contains(record, verb) {
				t.Errorf("the record lacks %s: %s", verb, record)
			}
		}
		if strings.Contains(f.log.String(), code) || strings.Contains(record, code) {
			t.Error("the code is in the log or in the record")
		}
		if got := f.do(t, "operator", "DELETE", "/v1/connect-codes/"+id, ""); got.code != 400 {
			t.Errorf("withdraw a used code: %+v", got)
		}
	})
}

// TestConnectOnce is a thief who shows the code at the same time.
func TestConnectOnce(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		_, code := f.connectCode(t, `{}`)
		var made, used atomic.Int32
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				switch got := f.connectFrom(t, fmt.Sprintf("192.0.%d.1:1", i), code); got {
				case 201:
					made.Add(1)
				case 409:
					used.Add(1)
				default:
					t.Errorf("got %d", got)
				}
			})
		}
		all.Wait()
		if made.Load() != 1 || used.Load() != 7 {
			t.Errorf("%d inboxes were made, and %d were told that the code was used", made.Load(), used.Load())
		}
	})
}

// TestConnectAttacks: codes that are guessed, ended, forged in the database, or of
// somebody who may not any more make nothing, and their answers do not differ.
func TestConnectAttacks(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	ann := f.owner(t, "ann")
	f.as("ann", ann)
	made := func(who string) string {
		t.Helper()
		got := f.do(t, who, "POST", "/v1/connect-codes", `{}`)
		if got.code != 201 {
			t.Fatalf("%+v", got)
		}
		return got.field(t, "code")
	}
	id, withdrawn := f.connectCode(t, `{}`)
	if got := f.do(t, "operator", "DELETE", "/v1/connect-codes/"+id, ""); got.code != 204 {
		t.Fatalf("%+v", got)
	}
	_, expired := f.connectCode(t, `{}`)
	f.exec(t, `update connect_code set expires_at = 1 where withdrawn_at = 0`)
	_, freer := f.connectCode(t, `{"display_name":"freer"}`)
	f.exec(t, `update connect_code set mode = 'autonomous' where display_name = 'freer'`)
	_, restored := f.connectCode(t, `{"display_name":"restored"}`)
	f.exec(t, `create table copied as select * from connect_code where display_name = 'restored'`)
	if got := f.redeem(t, restored); got.code != 201 {
		t.Fatalf("%+v", got)
	}
	f.exec(t, `delete from connect_code where display_name = 'restored'`)
	f.exec(t, `insert into connect_code select * from copied`)
	left := made("ann")
	f.exec(t, `update person set role = 'reviewer' where name = 'ann'`)

	var want string
	for _, tt := range []struct{ name, code string }{
		{"nothing", ""},
		{"a guess", "pcc_" + strings.Repeat("A", 26)},
		{"another secret", f.secret("key a").Reveal()},
		{"hostile", "pcc_'; drop table connect_code; --"},
		{"withdrawn", withdrawn},
		{"expired", expired},
		{"a freer mode in the database", freer},
		{"a used code, restored in the database", restored},
		{"of a former owner", left},
	} {
		f.srv.connects.by, f.srv.connects.order = newSignupLimiter("").by, newSignupLimiter("").order
		got := f.redeem(t, tt.code)
		said := got.field(t, "message")
		if want == "" {
			want = said
		}
		if got.code != 403 || got.field(t, "error") != "connect_refused" || said != want {
			t.Errorf("%s: %+v", tt.name, got)
		}
	}

	for _, tt := range []struct{ body, want string }{
		{`{"scopes":["send"]}`, "read"},
		{`{"scopes":["everything"]}`, "scopes"},
		{`{"mode":"free"}`, "mode"},
		{`{"address":"alice"}`, "alice@agents.test"},
		{`{"address":"a@b@c"}`, "address"},
		{`{"expires_at":"2020-01-01T00:00:00Z"}`, "expires_at"},
		{`{"expires_at":"2099-01-01T00:00:00Z"}`, "30 days"},
		{`{"code":"pcc_AAAA"}`, "code"},
	} {
		if got := f.do(t, "operator", "POST", "/v1/connect-codes", tt.body); got.code != 400 && got.code != 409 || !strings.Contains(got.field(t, "detail"), tt.want) {
			t.Errorf("%s: %+v", tt.body, got)
		}
	}
}

// TestConnectIsLimited is somebody who guesses: each wrong code costs, a right one does
// not, and no other address is kept from connecting.
func TestConnectIsLimited(t *testing.T) {
	f := setup(t, storetest.SQLite(t), nil)
	for range 12 {
		_, code := f.connectCode(t, `{}`)
		if got := f.connectFrom(t, "192.0.2.1:1", code); got != 201 {
			t.Fatalf("a right code: %d", got)
		}
	}
	codes := map[int]int{}
	for range 20 {
		codes[f.connectFrom(t, "192.0.2.1:1", "pcc_"+strings.Repeat("B", 26))]++
	}
	if codes[403] != 5 || codes[429] != 15 {
		t.Errorf("guesses got %v", codes)
	}
	_, code := f.connectCode(t, `{}`)
	if got := f.connectFrom(t, "198.51.100.1:1", code); got != 201 {
		t.Errorf("another address: %d", got)
	}
}
