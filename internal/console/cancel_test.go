package console_test

import (
	"net/http"
	"net/url"
	"testing"
	"time"

	"postern/internal/mailbox"
	"postern/internal/oversight"
)

// TestCancel: a person takes back what they approved, as long as it has not
// left, and is told when it is too late.
func TestCancel(t *testing.T) {
	f := setup(t)
	f.enter()
	o := mailbox.Outgoing{Draft: draft(), SendAt: time.Now().Add(time.Hour)}
	a, err := f.post.Send(t.Context(), f.agent, "rest", o)
	if err != nil {
		t.Fatal(err)
	}
	page := "/console/actions/" + a.ID
	contains(t, "pending", f.get(page).body, "Leaves", "not before", "approve-form")
	f.submit(page+"/decision", f.form(f.get(page).body, "approve-form"))
	approved := f.get(page)
	contains(t, "approved", approved.body, "can cancel it until then", "cancel-form")
	if got := f.submit(page+"/cancel", url.Values{}); got.status != http.StatusSeeOther {
		t.Errorf("cancel: %d", got.status)
	}
	contains(t, "cancelled", f.get(page).body, `data-state="cancelled"`, "cancelled by a person", "Nothing was sent.")
	contains(t, "decided", f.get("/console/decided").body, a.ID, `data-state="cancelled"`)
	if got := f.state(a.ID); got.State != oversight.Cancelled {
		t.Errorf("state = %s", got.State)
	}

	o.Subject, o.Timing = "Scheduled", mailbox.ScheduleFirst
	if a, err = f.post.Send(t.Context(), f.agent, "rest", o); err != nil {
		t.Fatal(err)
	}
	page = "/console/actions/" + a.ID
	contains(t, "scheduled", f.get(page).body, `data-state="scheduled"`, "at its scheduled time", "cancel-form")
	b := f.propose(draft())
	if err := f.gate.Decide(t.Context(), f.person, oversight.Decision{ID: b.ID, Version: b.Version, Digest: b.Hex(), Reason: "no"}); err != nil {
		t.Fatal(err)
	}
	if got := f.submit("/console/actions/"+b.ID+"/cancel", url.Values{}); got.status != http.StatusConflict {
		t.Errorf("cancel of what was rejected: %d", got.status)
	} else {
		contains(t, "too late", got.body, "Not cancelled")
	}

	// What is not kept any more is not shown as changed.
	if _, err := f.gate.DropPayloads(t.Context(), -time.Hour); err != nil {
		t.Fatal(err)
	}
	contains(t, "dropped", f.get("/console/actions/"+b.ID).body, "the content is no longer kept", "its digest is kept")
}
