package extract

import "testing"

// TestTargetsAreThoseThatBrowsersOpen: the WHATWG URL standard's leniency, as far
// as attackers use it.
func TestTargetsAreThoseThatBrowsersOpen(t *testing.T) {
	for _, tt := range []struct {
		link, scheme, host string
		userinfo, ip, ok   bool
	}{
		{"https://example.com/a?b=c", "https", "example.com", false, false, true},
		{"HTTPS://EXAMPLE.COM", "https", "example.com", false, false, true},
		{"//example.com/a", "https", "example.com", false, false, true},
		{`https:\\example.com\a`, "https", "example.com", false, false, true},
		{"https:example.com", "https", "example.com", false, false, true},
		{"https:////example.com", "https", "example.com", false, false, true},
		{" ht\ntps://exam\tple.com ", "https", "example.com", false, false, true},
		{"https://bank.example@evil.example/", "https", "evil.example", true, false, true},
		{"https://a:b@c@evil.example/", "https", "evil.example", true, false, true},
		{"https://example.com:8443/", "https", "example.com", false, false, true},
		{"https://example.com./", "https", "example.com", false, false, true},
		{"https://ex%61mple.com/", "https", "example.com", false, false, true},
		{"http://127.0.0.1/", "http", "127.0.0.1", false, true, true},
		{"http://2130706433/", "http", "2130706433", false, true, true},
		{"http://0x7f000001/", "http", "0x7f000001", false, true, true},
		{"http://[::1]/", "http", "[::1]", false, true, true},
		{"mailto:bob@example.com", "mailto", "", false, false, true},
		{"javascript:alert(1)", "javascript", "", false, false, true},
		{"java\nscript:alert(1)", "javascript", "", false, false, true},
		{"cid:logo@example.com", "cid", "", false, false, true},
		{"/relative", "", "", false, false, false},
		{"relative.html", "", "", false, false, false},
		{"#top", "", "", false, false, false},
		{"", "", "", false, false, false},
	} {
		got, ok := ParseTarget(tt.link)
		if ok != tt.ok || got.Scheme != tt.scheme || got.Host != tt.host || got.Userinfo != tt.userinfo || got.IP != tt.ip {
			t.Errorf("%q: %+v, %v", tt.link, got, ok)
		}
	}
}

func TestRegisteredDomainKnowsTheUsualSuffixes(t *testing.T) {
	for host, want := range map[string]string{
		"example.com": "example.com", "a.b.example.com": "example.com", "www.example.co.uk": "example.co.uk", "a.example.com.au": "example.com.au",
		"www.example.de": "example.de", "localhost": "localhost", "": "", "a.gouv.fr": "a.gouv.fr", "x.a.gouv.fr": "a.gouv.fr",
	} {
		if got := RegisteredDomain(host); got != want {
			t.Errorf("%q: %q, want %q", host, got, want)
		}
	}
}

func TestHostInFindsTheHostThatWordsShow(t *testing.T) {
	for text, want := range map[string]string{
		"https://example.com/a": "example.com", "www.example.com": "www.example.com", "example.com": "example.com", "(Example.COM)": "example.com",
		"Visit www.example.com today": "www.example.com", "Click here": "", "Node.js": "", "report.pdf": "", "bob@example.com": "", "version 1.2.3": "",
		"https://report.zip/": "report.zip", "See example.com": "", "": "",
	} {
		if got := HostIn(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}

// TestLoadsAreEveryWayToFetch: a reader who opens the mail is noticed by any.
func TestLoadsAreEveryWayToFetch(t *testing.T) {
	for _, tt := range []struct {
		doc, url string
		tiny     bool
	}{
		{`<img src="https://t.example/a.png">`, "https://t.example/a.png", false},
		{`<img src=https://t.example/a width=1 height=1>`, "https://t.example/a", true},
		{`<img src=https://t.example/a style="width: 1px">`, "https://t.example/a", true},
		{`<img src=https://t.example/a style="display: none">`, "https://t.example/a", true},
		{`<img srcset="https://t.example/a">`, "https://t.example/a", false},
		{`<table background="https://t.example/a">`, "https://t.example/a", false},
		{`<video poster="https://t.example/a">`, "https://t.example/a", false},
		{`<object data="https://t.example/a">`, "https://t.example/a", false},
		{`<link rel=stylesheet href="https://t.example/a">`, "https://t.example/a", false},
		{`<p style="background: url('https://t.example/a')">`, "https://t.example/a", false},
		{`<style>p { background: url(https://t.example/a) }</style>`, "https://t.example/a", false},
		{`<style>p { background: u/**/rl(https://t.example/a) }</style>`, "https://t.example/a", false},
		{`<a href="https://t.example/a">a link loads nothing</a>`, "", false},
		{`<p data="https://t.example/a">`, "", false},
		{`<!-- <img src=https://t.example/a> -->`, "", false},
	} {
		got := Loads(tt.doc)
		if tt.url == "" {
			if len(got) > 0 {
				t.Errorf("%s: loads %+v", tt.doc, got)
			}
			continue
		}
		if len(got) != 1 || got[0].URL != tt.url || got[0].Tiny != tt.tiny {
			t.Errorf("%s: loads %+v", tt.doc, got)
		}
	}
}
