package mailapi

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/notify"
	"postern/internal/secret"
	"postern/internal/store"
	"postern/internal/storetest"
)

// notifying gives the server a notifier, and makes the owner ann, the reviewer rita and
// the viewer vic, who are signed in.
func (f *fixture) notifying(t *testing.T) {
	t.Helper()
	secrets, err := secret.New(t.Context(), f.srv.log, f.db, secret.Config{Server: make([]byte, 32)})
	if err != nil {
		t.Fatal(err)
	}
	box, err := secrets.Box("notices")
	if err != nil {
		t.Fatal(err)
	}
	conf := f.srv.conf
	conf.Notify, err = notify.New(f.srv.log, f.db, f.gate, notify.Config{Base: "https://postern.example", Box: box})
	if err != nil {
		t.Fatal(err)
	}
	f.srv = New(f.srv.log, f.db, f.gate, f.post, conf)
	f.clients["nobody"] = client{f.srv.Handler(), nil}
	f.signIn(t, "ann", auth.Owner)
	f.signIn(t, "rita", auth.Reviewer)
	f.signIn(t, "vic", auth.Viewer)
	operator := f.person
	operator.ID, operator.Operator = "operator", true
	f.as("operator", operator)
	foreign := f.person
	foreign.Project = f.foreign.Project
	f.as("foreign person", foreign)
	for _, name := range []string{"key a", "project"} {
		f.clients[name] = client{f.srv.Handler(), f.clients[name].header}
	}
}

// settings returns the answer of a request for settings.
func settings(t *testing.T, got answered) (v api.NotifySettingsStatus) {
	t.Helper()
	if err := json.Unmarshal([]byte(got.body), &v); err != nil || got.code != http.StatusOK {
		t.Fatalf("settings: %d, %v: %s", got.code, err, got.body)
	}
	return v
}

func TestNotifySettings(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.notifying(t)
		const own, project = "/v1/notify/settings", "/v1/notify/settings/project"
		if v := settings(t, f.do(t, "vic", "GET", own, "")); v.Own || v.Settings.QuietFrom != "" || v.Project.EscalateMinutes != 0 {
			t.Errorf("at first: %+v", v)
		}
		v := settings(t, f.do(t, "ann", "PUT", project, `{"zone":"Europe/Berlin","collect_minutes":30,"escalate_minutes":60,"escalate_to":["role:owner","person:rita"]}`))
		if v.Own || v.Settings.Zone != "Europe/Berlin" || v.Project.EscalateMinutes != 60 || len(v.Project.EscalateTo) != 2 {
			t.Errorf("the project's: %+v", v)
		}
		v = settings(t, f.do(t, "vic", "PUT", own, `{"quiet_from":"22:00","quiet_to":"07:30","quiet_days":["monday","sunday"],"silent":true,"detail":true}`))
		if !v.Own || v.Settings.Zone != "" || v.Settings.QuietTo != "07:30" || fmt.Sprint(v.Settings.QuietDays) != "[monday sunday]" || !v.Settings.Silent || !v.Settings.Detail || v.Project.Zone != "Europe/Berlin" {
			t.Errorf("her own: %+v", v)
		}
		if v := settings(t, f.do(t, "rita", "GET", own, "")); v.Own || v.Settings.CollectMinutes != 30 {
			t.Errorf("another's: %+v", v)
		}
		if got := f.do(t, "vic", "DELETE", own, ""); got.code != http.StatusNoContent {
			t.Errorf("go back: %+v", got)
		}
		if v := settings(t, f.do(t, "vic", "GET", own, "")); v.Own || v.Settings.Zone != "Europe/Berlin" {
			t.Errorf("after that: %+v", v)
		}
		// The operator has no account, and manages the project's.
		if v := settings(t, f.do(t, "operator", "GET", own, "")); v.Own {
			t.Errorf("the operator's: %+v", v)
		}
		if v := settings(t, f.do(t, "operator", "PUT", project, `{}`)); v.Project.EscalateMinutes != 0 || v.Project.Zone != "" {
			t.Errorf("by the operator: %+v", v)
		}

		for name, tt := range map[string]struct {
			who, method, path, body string
			code                    int
		}{
			"zone":                        {"vic", "PUT", own, `{"zone":"Mars/Olympus"}`, 400},
			"the server's own files":      {"vic", "PUT", own, `{"zone":"../../etc/passwd"}`, 400},
			"half of the hours":           {"vic", "PUT", own, `{"quiet_from":"22:00"}`, 400},
			"no time":                     {"vic", "PUT", own, `{"quiet_from":"22:00","quiet_to":"late"}`, 400},
			"no day":                      {"vic", "PUT", own, `{"quiet_days":["someday"]}`, 400},
			"a day twice":                 {"vic", "PUT", own, `{"quiet_days":["monday","monday"]}`, 400},
			"collect":                     {"vic", "PUT", own, `{"collect_minutes":-1}`, 400},
			"escalation of one's own":     {"vic", "PUT", own, `{"escalate_minutes":5,"escalate_to":["role:owner"]}`, 400},
			"escalation to nobody":        {"ann", "PUT", project, `{"escalate_minutes":5}`, 400},
			"escalation to a stranger":    {"ann", "PUT", project, `{"escalate_minutes":5,"escalate_to":["person:mallory"]}`, 400},
			"the project's by a reviewer": {"rita", "PUT", project, `{}`, 403},
			"the operator's own":          {"operator", "PUT", own, `{}`, 403},
			"the operator's end":          {"operator", "DELETE", own, "", 403},
			"an agent":                    {"key a", "PUT", own, `{}`, 403}, // the attack: it silences the reviewers
			"a project key":               {"project", "PUT", project, `{"silent":true}`, 403},
		} {
			if got := f.do(t, tt.who, tt.method, tt.path, tt.body); got.code != tt.code {
				t.Errorf("%s: got %d %s, want %d", name, got.code, got.body, tt.code)
			}
		}
	})
}

func TestNotifyRooms(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.notifying(t)
		const path, token, signing, hook = "/v1/notify/rooms", "xoxb-1234567890-secret", "0123456789abcdef0123456789abcdef", "https://93.184.216.34/workflows/secret-hook"
		slack := f.do(t, "ann", "POST", path, `{"kind":"slack","name":"reviews","channel":"C0123456789","token":"`+token+`","signing_secret":"`+signing+`"}`)
		if slack.code != http.StatusCreated || slack.field(t, "channel") != "C0123456789" || slack.field(t, "created_by") != "person:ann" {
			t.Fatalf("add: %+v", slack)
		}
		teams := f.do(t, "operator", "POST", path, `{"kind":"teams","name":"team","url":"`+hook+`"}`)
		if teams.code != http.StatusCreated {
			t.Fatalf("add: %+v", teams)
		}
		list := f.do(t, "vic", "GET", path, "")
		var l api.NotifyRoomList
		if err := json.Unmarshal([]byte(list.body), &l); err != nil || len(l.Rooms) != 2 || l.Rooms[0].Name != "reviews" {
			t.Errorf("list: %s", list.body)
		}
		// Credentials go in and never out.
		record := f.do(t, "ann", "GET", "/v1/audit", "")
		bad := f.do(t, "ann", "POST", path, `{"kind":"slack","name":"two","channel":"C0123456789","token":"`+strings.Replace(token, "xoxb", "xoxp", 1)+`"}`)
		for name, text := range map[string]string{"add": slack.body + teams.body, "list": list.body, "record": record.body, "error": bad.body, "log": f.log.String()} {
			for _, s := range []string{token[10:], signing, "secret-hook"} {
				if strings.Contains(text, s) {
					t.Errorf("%s tells a credential: %.300s", name, text)
				}
			}
		}
		if !strings.Contains(record.body, "notify.room") {
			t.Errorf("the record: %.300s", record.body)
		}
		id := slack.field(t, "id")
		for name, tt := range map[string]struct {
			who, method, path, body string
			code                    int
		}{
			"a wrong token":         {"ann", "POST", path, `{"kind":"slack","name":"two","channel":"C0123456789","token":"x"}`, 400},
			"an address in here":    {"ann", "POST", path, `{"kind":"teams","name":"two","url":"https://169.254.169.254/latest"}`, 400}, // the attack: the cloud's metadata
			"no https":              {"ann", "POST", path, `{"kind":"teams","name":"two","url":"http://teams.example/"}`, 400},
			"another kind":          {"ann", "POST", path, `{"kind":"push","name":"two"}`, 400},
			"the name again":        {"ann", "POST", path, `{"kind":"teams","name":"team","url":"` + hook + `"}`, 400},
			"a reviewer":            {"rita", "POST", path, `{"kind":"teams","name":"two","url":"` + hook + `"}`, 403},
			"an agent":              {"key a", "POST", path, `{"kind":"teams","name":"two","url":"` + hook + `"}`, 403},
			"a test by a reviewer":  {"rita", "POST", path + "/" + id + "/test", "", 403},
			"a test of another's":   {"foreign person", "POST", path + "/" + id + "/test", "", 404},
			"removal by a reviewer": {"rita", "DELETE", path + "/" + id, "", 403},
			"removal of another's":  {"foreign person", "DELETE", path + "/" + id, "", 404},
			"none":                  {"ann", "DELETE", path + "/rom_AAAAAAAAAAAAAAAAAAAAAAAAAA", "", 404},
		} {
			if got := f.do(t, tt.who, tt.method, tt.path, tt.body); got.code != tt.code {
				t.Errorf("%s: got %d %s, want %d", name, got.code, got.body, tt.code)
			}
		}
		if got := f.do(t, "ann", "DELETE", path+"/"+id, ""); got.code != http.StatusNoContent {
			t.Errorf("remove: %+v", got)
		}
	})
}

// slackCode makes a code as Slack shows it to the holder of an account.
func (f *fixture) slackCode(t *testing.T, user string) string {
	t.Helper()
	code := rand.Text()
	sum := sha256.Sum256([]byte(code))
	hash := hex.EncodeToString(sum[:])
	err := f.db.Update(t.Context(), func(tx *store.Tx) error {
		_, err := tx.ExecContext(t.Context(), `insert into slack_code (hash, project_id, team_id, user_id, name, expires_at, used_at) values ($1, $2, 'T1', $3, 'Rita', $4, 0)`,
			hash, f.person.Project, user, store.Time(time.Now().Add(time.Minute)))
		if err != nil {
			return err
		}
		return tx.Seal(t.Context(), notify.SealedSlackCodes(), `hash = $1`, hash)
	})
	if err != nil {
		t.Fatal(err)
	}
	return code
}

func TestSlackLink(t *testing.T) {
	storetest.Each(t, func(t *testing.T, db *store.DB) {
		f := setup(t, db, nil)
		f.notifying(t)
		const path = "/v1/notify/slack"
		code := f.slackCode(t, "U1")
		link := func(code, team, user string) string {
			return fmt.Sprintf(`{"code":%q,"team":%q,"user":%q}`, code, team, user)
		}
		if got := f.do(t, "rita", "GET", path, ""); got.code != http.StatusOK || got.field(t, "linked_at") != "<nil>" {
			t.Errorf("at first: %+v", got)
		}
		for range 2 { // it changes nothing
			got := f.do(t, "rita", "POST", path+"/lookup", `{"code":"`+code+`"}`)
			if got.code != http.StatusOK || got.field(t, "team") != "T1" || got.field(t, "user") != "U1" || got.field(t, "name") != "Rita" {
				t.Fatalf("look up: %+v", got)
			}
		}
		for name, tt := range map[string]struct {
			who, body string
			code      int
		}{
			"an account that was not looked up": {"rita", link(code, "T1", "U2"), 400}, // the attack: a colleague's code, unseen
			"without the account":               {"rita", link(code, "", ""), 400},
			"a wrong code":                      {"rita", link("AAAA", "T1", "U1"), 400},
			"of another project":                {"foreign person", link(code, "T1", "U1"), 400},
			"the operator":                      {"operator", link(code, "T1", "U1"), 403},
			"an agent":                          {"key a", link(code, "T1", "U1"), 403},
		} {
			if got := f.do(t, tt.who, "POST", path, tt.body); got.code != tt.code {
				t.Errorf("%s: got %d %s, want %d", name, got.code, got.body, tt.code)
			}
		}
		if got := f.do(t, "rita", "POST", path, link(code, "T1", "U1")); got.code != http.StatusOK || got.field(t, "linked_at") == "<nil>" {
			t.Fatalf("link: %+v", got)
		}
		// A code is good once, and an account is one person's.
		if got := f.do(t, "vic", "POST", path, link(code, "T1", "U1")); got.code != http.StatusBadRequest {
			t.Errorf("again: %+v", got)
		}
		if got := f.do(t, "vic", "POST", path, link(f.slackCode(t, "U1"), "T1", "U1")); got.code != http.StatusBadRequest {
			t.Errorf("one account of two people: %+v", got)
		}
		if got := f.do(t, "vic", "DELETE", path+"/rita", ""); got.code != http.StatusForbidden {
			t.Errorf("a viewer ends another's: %+v", got)
		}
		if got := f.do(t, "rita", "DELETE", path+"/rita", ""); got.code != http.StatusNoContent {
			t.Errorf("end: %+v", got)
		}
		if got := f.do(t, "rita", "GET", path, ""); got.field(t, "linked_at") != "<nil>" {
			t.Errorf("after that: %+v", got)
		}
		if got := f.do(t, "ann", "DELETE", path+"/"+strings.Repeat("a", 64), ""); got.code != http.StatusBadRequest {
			t.Errorf("a long name: %+v", got)
		}
		if got := f.do(t, "rita", "GET", "/v1/notify/devices", ""); got.code != http.StatusOK || !strings.Contains(got.body, `"devices":[]`) {
			t.Errorf("devices: %+v", got)
		}
		if got := f.do(t, "rita", "DELETE", "/v1/notify/devices/dev_AAAAAAAAAAAAAAAAAAAAAAAAAA", ""); got.code != http.StatusNotFound {
			t.Errorf("no device: %+v", got)
		}
	})
}
