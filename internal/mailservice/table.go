package mailservice

// services are the mail services whose requests are mail. To add one, add its row
// here, its parser in a file of its own, and a request of its official client to
// testdata; docs/reference/mail-services.md lists them all.
//
// A host's row begins as a wall: what is neither in sends nor in harmless is asked
// about, unless it reads.
var services = []service{
	{
		name: "Gmail", hosts: []string{"gmail.googleapis.com", "www.googleapis.com", "content.googleapis.com", "content-gmail.googleapis.com", "gmail.mtls.googleapis.com", "www.mtls.googleapis.com", "clients6.google.com", "gmail.clients6.google.com"},
		within: []string{"/gmail/", "/upload/gmail/", "/resumable/upload/gmail/", "/batch/"},
		header: googleHeader,
		sends:  gmailSends, harmless: gmailHarmless,
	},
	{
		// The attack: a connection to storage.googleapis.com, which passes uninspected, and
		// in it a request for gmail.googleapis.com: Google's servers answer for all their
		// hosts. An inspected connection has one host.
		name: "Gmail", hosts: []string{"*.googleapis.com", "*.mtls.googleapis.com", "*.clients6.google.com"},
		within: []string{"/gmail/", "/upload/gmail/", "/resumable/upload/gmail/", "/batch/gmail/"},
		header: googleHeader, sends: gmailSends, harmless: gmailHarmless,
	},
	{
		name: "Microsoft Graph", hosts: []string{"graph.microsoft.com", "graph.microsoft.us", "dod-graph.microsoft.us", "microsoftgraph.chinacloudapi.cn"},
		fold:   true,
		header: []string{"client-request-id", "return-client-request-id", "sdkversion", "prefer", "consistencylevel"},
		sends: []endpoint{
			{"POST", "/v1.0/me/sendMail", nil, graphSend},
			{"POST", "/v1.0/users/{id}/sendMail", nil, graphSend},
			{"POST", "/beta/me/sendMail", nil, graphSend},
			{"POST", "/beta/users/{id}/sendMail", nil, graphSend},
			{"POST", "/v1.0/me/messages/{id}/send", nil, nil}, // Microsoft has the draft
			{"POST", "/v1.0/users/{id}/messages/{message}/send", nil, nil},
		},
		harmless: []string{
			"POST /v1.0/me/messages", "PATCH /v1.0/me/messages/{id}", "DELETE /v1.0/me/messages/{id}", "POST /v1.0/me/messages/{id}/attachments", "POST /v1.0/me/messages/{id}/move",
			"POST /v1.0/me/messages/{id}/createReply", "POST /v1.0/me/messages/{id}/createReplyAll", "POST /v1.0/me/messages/{id}/createForward",
			"POST /v1.0/users/{user}/messages", "PATCH /v1.0/users/{user}/messages/{id}", "DELETE /v1.0/users/{user}/messages/{id}",
			"PUT /v1.0/me/drive/**", "PATCH /v1.0/me/drive/**", "DELETE /v1.0/me/drive/**", "PUT /v1.0/drives/**", "PATCH /v1.0/drives/**", "DELETE /v1.0/drives/**",
			"PUT /v1.0/sites/**", "PATCH /v1.0/sites/**", "DELETE /v1.0/sites/**", "PUT /v1.0/users/{user}/drive/**", "PUT /v1.0/groups/{group}/drive/**",
		},
	},
	{
		name: "Amazon SES", hosts: []string{
			"email.*.amazonaws.com", "email-fips.*.amazonaws.com", "email.*.api.aws", "email-fips.*.api.aws", "email.*.amazonaws.com.cn", "*.email.*.vpce.amazonaws.com", "*.email-fips.*.vpce.amazonaws.com",
		},
		reads: true, // the query API takes its action from the URL, too
		header: []string{
			"x-amz-date", "x-amz-content-sha256", "x-amz-security-token", "x-amz-user-agent", "amz-sdk-invocation-id", "amz-sdk-request", "amz-sdk-retry", "x-amz-api-version",
		},
		sends: []endpoint{
			{"POST", "/v2/email/outbound-emails", nil, sesSend},
			{"POST", "/v2/email/outbound-bulk-emails", nil, nil}, // a template has the text
			{"POST", "/", nil, sesQuery},
		},
		harmless: []string{"GET /v2/email/**", "HEAD /v2/email/**", "OPTIONS /v2/email/**"},
	},
	{
		name: "SendGrid", hosts: []string{"api.sendgrid.com", "api.eu.sendgrid.com"},
		sends: []endpoint{
			{"POST", "/v3/mail/send", nil, sendgridSend},
		},
		harmless: []string{"POST /v3/mail/batch"},
	},
	{
		name: "Resend", hosts: []string{"api.resend.com"},
		header: []string{"x-batch-validation"},
		sends: []endpoint{
			{"POST", "/emails", nil, resendSend},
			{"POST", "/emails/batch", nil, resendBatch},
		},
		harmless: []string{"POST /emails/{id}/cancel"},
	},
	{
		name: "Mailgun", hosts: []string{"api.mailgun.net", "api.eu.mailgun.net"},
		sends: []endpoint{
			{"POST", "/v3/{domain}/messages", nil, mailgunSend},
			{"POST", "/v3/{domain}/messages.mime", nil, mailgunMIME},
		},
	},
	{
		name: "Postmark", hosts: []string{"api.postmarkapp.com"},
		header: []string{"x-postmark-server-token", "x-postmark-account-token"},
		sends: []endpoint{
			{"POST", "/email", nil, postmarkSend},
			{"POST", "/email/batch", nil, postmarkBatch},
			{"POST", "/email/withTemplate", nil, nil}, // Postmark has the text
			{"POST", "/email/batchWithTemplates", nil, nil},
		},
	},
	{
		name: "Brevo", hosts: []string{"api.brevo.com", "api.sendinblue.com"},
		header: []string{"api-key", "partner-key", "x-fern-language", "x-fern-sdk-name", "x-fern-sdk-version", "x-fern-runtime", "x-fern-runtime-version"},
		sends: []endpoint{
			{"POST", "/v3/smtp/email", nil, brevoSend},
		},
	},
	{
		name: "MailerSend", hosts: []string{"api.mailersend.com"},
		sends: []endpoint{
			{"POST", "/v1/email", nil, mailersendSend},
			{"POST", "/v1/bulk-email", nil, mailersendBulk},
		},
	},
	{
		name: "MultiMail", hosts: []string{"api.multimail.dev"},
		header: []string{"x-api-key"},
		sends: []endpoint{
			{"POST", "/v1/mailboxes/{id}/send", nil, multimailSend},
			{"POST", "/v1/mailboxes/{id}/reply/{email}", nil, nil}, // MultiMail knows who gets it
		},
		harmless: []string{
			"POST /v1/mailboxes/{id}/emails/{email}/cancel", "PUT /v1/mailboxes/{id}/emails/{email}/tags", "DELETE /v1/mailboxes/{id}/emails/{email}/tags/{tag}",
		},
	},
}

var googleQuery = map[string][]string{"alt": {"json"}, "prettyPrint": {"true", "false"}}

var googleUploadQuery = map[string][]string{"alt": {"json"}, "prettyPrint": {"true", "false"}, "uploadType": {"media", "multipart"}}

var googleHeader = []string{"x-goog-api-client", "x-goog-user-project", "x-goog-quota-user", "gdata-version", "x-upload-content-type", "x-upload-content-length"}

var gmailSends = []endpoint{
	{"POST", "/gmail/v1/users/{user}/messages/send", googleQuery, gmailSend},
	{"POST", "/upload/gmail/v1/users/{user}/messages/send", googleUploadQuery, gmailUpload},
	{"POST", "/gmail/v1/users/{user}/drafts/send", nil, nil}, // Gmail has the draft
	{"POST", "/upload/gmail/v1/users/{user}/drafts/send", nil, nil},
}

var gmailHarmless = []string{
	"POST /gmail/v1/users/{user}/messages/{id}/modify", "POST /gmail/v1/users/{user}/messages/{id}/trash", "POST /gmail/v1/users/{user}/messages/{id}/untrash",
	"POST /gmail/v1/users/{user}/messages/batchModify", "POST /gmail/v1/users/{user}/messages/batchDelete", "DELETE /gmail/v1/users/{user}/messages/{id}",
	"POST /gmail/v1/users/{user}/threads/{id}/modify", "POST /gmail/v1/users/{user}/threads/{id}/trash", "POST /gmail/v1/users/{user}/threads/{id}/untrash",
	"DELETE /gmail/v1/users/{user}/threads/{id}",
	"POST /gmail/v1/users/{user}/drafts", "PUT /gmail/v1/users/{user}/drafts/{id}", "DELETE /gmail/v1/users/{user}/drafts/{id}",
	"POST /upload/gmail/v1/users/{user}/drafts", "PUT /upload/gmail/v1/users/{user}/drafts/{id}",
	"POST /gmail/v1/users/{user}/labels", "PUT /gmail/v1/users/{user}/labels/{id}", "PATCH /gmail/v1/users/{user}/labels/{id}", "DELETE /gmail/v1/users/{user}/labels/{id}",
	"POST /gmail/v1/users/{user}/watch", "POST /gmail/v1/users/{user}/stop",
}
