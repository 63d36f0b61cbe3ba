package mailapi

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"postern/internal/mail"
	"postern/internal/mailbox"
	"postern/internal/store"
	"postern/internal/storetest"
)

// TestDomains is a project that brings a domain, uses it, and loses it.
func TestDomains(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		got := f.do(t, "project", "POST", "/v1/domains", `{"domain":"Bücher.example"}`)
		if got.code != 201 || got.field(t, "domain") != "xn--bcher-kva.example" || got.field(t, "unicode") != "bücher.example" || got.field(t, "status") != "pending_verification" {
			t.Fatalf("add = %+v", got)
		}
		one := got.header.Get("Location")
		for name, tt := range map[string]struct {
			body string
			code int
			kind string
		}{
			"twice":         {`{"domain":"bücher.example"}`, 409, "domain_taken"},
			"a suffix":      {`{"domain":"co.uk"}`, 400, "invalid_request"},
			"the server's":  {`{"domain":"x.agents.test"}`, 400, "invalid_request"},
			"nothing":       {`{}`, 400, "invalid_request"},
			"another type":  {`{"domain":7}`, 400, "invalid_request"},
			"unknown field": {`{"domain":"a.example","verified":true}`, 400, "invalid_request"},
		} {
			if got := f.do(t, "project", "POST", "/v1/domains", tt.body); got.code != tt.code || got.field(t, "error") != tt.kind {
				t.Errorf("%s = %+v", name, got)
			}
		}
		inbox := `{"address":"sales@bücher.example"}`
		if got := f.do(t, "project", "POST", "/v1/inboxes", inbox); got.code != 400 || !strings.Contains(got.body, "verified") {
			t.Errorf("an inbox in a domain that is not proved = %+v", got)
		}
		var rs struct {
			Records []struct{ Kind, Type, Name, Value, Result, Detail string }
		}
		records := func() map[string]string {
			t.Helper()
			if err := json.Unmarshal([]byte(f.do(t, "person", "GET", one+"/records", "").body), &rs); err != nil {
				t.Fatal(err)
			}
			out := map[string]string{}
			for _, r := range rs.Records {
				out[r.Kind] = r.Result
			}
			return out
		}
		if got := records(); got["ownership"] != "unchecked" || got["mx"] != "unchecked" {
			t.Errorf("records = %v", got)
		}
		for _, r := range rs.Records {
			if r.Kind == "ownership" {
				f.dns.TXT(r.Name+".", r.Value)
			}
		}
		if got := f.do(t, "project", "POST", one+"/verify", ""); got.code != 200 || got.field(t, "state") != "degraded" || got.field(t, "status") != "verified" || !strings.Contains(got.field(t, "problem"), "MX") {
			t.Errorf("verify = %+v", got)
		}
		if got := records(); got["ownership"] != "ok" || got["mx"] != "missing" {
			t.Errorf("records = %v", got)
		}

		// Now it makes inboxes: for this project alone.
		got = f.do(t, "project", "POST", "/v1/inboxes", inbox)
		if got.code != 201 || got.field(t, "address") != "sales@xn--bcher-kva.example" {
			t.Fatalf("create = %+v", got)
		}
		id, key := got.field(t, "id"), got.field(t, "key")
		if got := f.do(t, "foreign project", "POST", "/v1/inboxes", `{"address":"support2@bücher.example"}`); got.code != 400 {
			t.Errorf("another project makes an inbox in it = %+v", got)
		}
		if got := f.do(t, "foreign project", "POST", "/v1/domains", `{"domain":"mail.bücher.example"}`); got.code != 409 {
			t.Errorf("another project takes a name below it = %+v", got)
		}
		if got := f.do(t, "project", "DELETE", one, ""); got.code != 409 || got.field(t, "error") != "domain_in_use" {
			t.Errorf("remove with an inbox = %+v", got)
		}
		for to, want := range map[string]bool{"sales@bücher.example": true, "SALES@xn--bcher-kva.EXAMPLE": true, "nobody@bücher.example": false} {
			if err := f.post.Accepts(t.Context(), to); (err == nil) != want {
				t.Errorf("Accepts(%s) = %v", to, err)
			}
		}
		arrival := mailbox.Arrival{Envelope: mail.Envelope{From: "bob@example.com", To: []string{"sales@bücher.example"}, Raw: []byte("Subject: x\r\n\r\nx\r\n")}}
		if err := f.post.Receive(t.Context(), arrival); err != nil {
			t.Error(err)
		}
		send := func() answered {
			t.Helper()
			return f.do(t, "project", "POST", "/v1/inboxes/"+id+"/messages", draft, "Authorization", "Bearer "+key)
		}
		if got := send(); got.code != 202 {
			t.Errorf("send = %+v", got)
		}

		// Lost: it receives and does not send, and makes no more inboxes.
		lose := func(column string, age time.Duration) {
			t.Helper()
			err := db.Update(t.Context(), func(tx *store.Tx) error {
				_, err := tx.ExecContext(t.Context(), fmt.Sprintf(`update mail_domain set %s = %s - $1`, column, column), age.Microseconds())
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
		}
		f.dns.Remove("_postern.xn--bcher-kva.example.")
		f.do(t, "project", "POST", one+"/verify", "")
		lose("missing_since", 25*time.Hour)
		if got := f.do(t, "project", "POST", one+"/verify", ""); got.field(t, "state") != "lost" || got.field(t, "status") != "failed" {
			t.Errorf("verify = %+v", got)
		}
		if got := send(); got.code != 403 || got.field(t, "error") != "domain_not_verified" {
			t.Errorf("send from a lost domain = %+v", got)
		}
		if err := f.post.Receive(t.Context(), arrival); err != nil {
			t.Errorf("receive for a lost domain: %v", err)
		}
		if got := f.do(t, "project", "POST", "/v1/inboxes", `{"address":"more@bücher.example"}`); got.code != 400 {
			t.Errorf("create in a lost domain = %+v", got)
		}

		// Free: another project proves it, and gets the address, not the mail.
		lose("lost_at", 15*24*time.Hour)
		f.do(t, "project", "POST", one+"/verify", "")
		if err := f.post.Accepts(t.Context(), "sales@bücher.example"); err == nil {
			t.Error("mail for a domain that nobody holds is taken")
		}
		got = f.do(t, "foreign project", "POST", "/v1/domains", `{"domain":"bücher.example"}`)
		theirs := got.header.Get("Location")
		if err := json.Unmarshal([]byte(f.do(t, "foreign person", "GET", theirs+"/records", "").body), &rs); err != nil {
			t.Fatal(err)
		}
		f.dns.TXT(rs.Records[0].Name+".", rs.Records[0].Value)
		if got := f.do(t, "foreign project", "POST", theirs+"/verify", ""); got.field(t, "status") != "verified" {
			t.Errorf("verify by another = %+v", got)
		}
		if got := f.do(t, "foreign project", "POST", "/v1/inboxes", inbox); got.code != 201 || got.field(t, "id") == id {
			t.Errorf("create by another = %+v", got)
		}
		if got := f.do(t, "project", "GET", "/v1/inboxes/"+id+"/messages", "", "Authorization", "Bearer "+key); got.code != 200 || !strings.Contains(got.body, `"subject":"x"`) {
			t.Errorf("the former holder's mail = %+v", got)
		}
		if got := send(); got.code != 403 {
			t.Errorf("the former holder sends = %+v", got)
		}
		for _, path := range []string{"/v1/domains/nothing", "/v1/domains/%27%20or%201=1", "/v1/domains/dom_X/records"} {
			if got := f.do(t, "project", "GET", path, ""); got.code != 404 {
				t.Errorf("%s = %+v", path, got)
			}
		}
	})
}
