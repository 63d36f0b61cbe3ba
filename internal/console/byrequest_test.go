package console_test

import (
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"postern/internal/auth"
	"postern/internal/outgoing"
)

// sendgrid returns a request that makes SendGrid send one mail to each of to.
func sendgrid(from string, to ...string) *outgoing.Request {
	var each []string
	for _, a := range to {
		each = append(each, fmt.Sprintf(`{"to":[{"email":%q,"name":"<b>Ada</b>"}],"bcc":[{"email":"hidden@example.org"}]}`, a))
	}
	body := fmt.Sprintf(`{"from":{"email":%q},"personalizations":[%s],"subject":"Quarterly report","content":[{"type":"text/plain","value":"Please find it attached."},`+
		`{"type":"text/html","value":"<p>Please find it <b>attached</b>.</p>"}],"attachments":[{"content":"aWQ=","filename":"report.csv","type":"text/csv"}],"categories":["report"]}`, from, strings.Join(each, ","))
	return &outgoing.Request{
		Method: "POST", Scheme: "https", Host: "api.sendgrid.com", Port: 443, Path: "/v3/mail/send",
		Header: http.Header{"Content-Type": {"application/json"}, "Authorization": {"Bearer pst_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}},
		Body:   []byte(body), Whole: true, Size: int64(len(body)), Uses: []outgoing.Use{{Secret: "sendgrid", Where: "header Authorization"}},
	}
}

func TestSendByRequestIsShownAsMail(t *testing.T) {
	f := setup(t)
	f.enter()
	who := auth.Principal{Kind: auth.Sandbox, ID: "i1", Project: f.project.Project, Inbox: f.inbox.ID, Template: "base"}
	p, err := f.post.ProposeRequest(t.Context(), who, sendgrid("boss@example.com", "ada@example.net"), "")
	if err != nil {
		t.Fatal(err)
	}
	path := "/console/actions/" + p.ID
	page := f.get(path)
	if dir := os.Getenv("POSTERN_TEST_PAGES"); dir != "" {
		_ = os.WriteFile(dir+"/byrequest.html", []byte(page.body), 0o600)
		_ = os.WriteFile(dir+"/queue.html", []byte(f.get("/console/queue").body), 0o600)
	}
	contains(t, "page", page.body, "ada@example.net", "&lt;b&gt;Ada&lt;/b&gt;", "hidden@example.org", "Quarterly report", "Please find it attached.", "report.csv",
		"HTTPS request to api.sendgrid.com (SendGrid), exactly as below", "boss@example.com, not from "+f.inbox.Address, "sendgrid in header Authorization", "Request source", `id="no-edit"`, "approve-form")
	if strings.Contains(page.body, `id="edit"`) || f.get(path+"/edit").status == http.StatusOK {
		t.Error("its edit is offered")
	}
	if got := f.get(path + "/raw"); !strings.Contains(got.body, `"host":"api.sendgrid.com"`) {
		t.Errorf("source: %s", got.body)
	}
	if got := f.get(path + "/html?digest=" + p.Hex()); got.status == http.StatusOK && !strings.Contains(got.body, "attached") {
		t.Errorf("HTML: %s", got.body)
	}
	several, err := f.post.ProposeRequest(t.Context(), who, sendgrid(f.inbox.Address, "ada@example.net", "bob@example.net"), "")
	if err != nil {
		t.Fatal(err)
	}
	contains(t, "page of several", f.get("/console/actions/"+several.ID).body, "2 emails by SendGrid", "ada@example.net", "bob@example.net", "Email 2 of 2, to")
}
