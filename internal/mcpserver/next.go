package mcpserver

// nextSteps says for each tool what an agent does after it. It ends the tool's
// description, which is often all that an agent reads.
func nextSteps() map[string]string {
	const status = "email_action_status with the actionId."
	return map[string]string{
		"email_account":       "email_inbox to read, email_send to write.",
		"email_inbox":         "email_message_get with an id.",
		"email_search":        "email_message_get with an id.",
		"email_message_get":   "email_reply with this id, or email_thread_get.",
		"email_thread_get":    "email_reply with the id of a message.",
		"email_labels_list":   "email_search with label:name.",
		"email_draft_create":  "email_draft_send proposes the draft; email_send proposes an email without one.",
		"email_archive":       "none if it was done; else " + status,
		"email_trash":         status,
		"email_send":          "go on with your work; " + status,
		"email_reply":         "go on with your work; " + status,
		"email_forward":       "go on with your work; " + status,
		"email_action_status": "while pending, ask again with waitSeconds; when denied, heed the reason.",
		"email_help":          "email_help with the name of a tool.",

		"email_draft_list":   "email_draft_get with a draftId.",
		"email_draft_get":    "email_draft_update or email_draft_send with its version.",
		"email_draft_update": "email_draft_send with the new version.",
		"email_draft_delete": "none.",
		"email_draft_send":   "go on with your work; " + status,

		"wait_for_email":        "email_message_get with an id; wait_for_email with the answer's after.",
		"email_action_list":     "email_action_status with an actionId.",
		"email_cancel":          "email_send, if something else is to be sent.",
		"email_edit":            status,
		"email_quarantine_list": "email_quarantine_get with an id.",
		"email_quarantine_get":  "none: a person releases or drops it.",
		"email_oversight_get":   "email_allow_request or email_mode_request, if your task needs more.",
		"email_allow_request":   status,
		"email_mode_request":    status,
		"email_mode_code":       "email_oversight_get shows the mode.",

		"domain_add":    "have the records published, then domain_status with check.",
		"domain_status": "have published what is missing; a verified domain can have inboxes.",

		"network_denials": "network_request, if your task needs a host.",
		"network_request": "repeat the request once it is approved.",

		"sandbox_create": "run_code or run_command.",
		"run_code":       "run_code again: variables are kept.",
		"run_command":    "run_command again, or file_read.",
		"file_read":      "file_read with a larger offset, if there is more.",
		"file_write":     "run_command or run_code.",
		"file_list":      "file_read with a path.",
		"sandbox_kill":   "sandbox_create makes another one.",

		"run_propose":   "run_status with the runId.",
		"run_status":    "run_artifacts once it has ended.",
		"run_artifacts": "run_artifacts with the number of a released file.",
	}
}
