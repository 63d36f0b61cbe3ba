package console_test

import (
	"mime"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"unicode"

	"golang.org/x/net/html"

	"postern/internal/console"
	"postern/internal/mail"
)

func TestRenderedHTMLIsInert(t *testing.T) {
	for _, tt := range []struct {
		name, doc    string
		want         []string
		without      []string
		remote, left int
	}{
		{"a plain mail keeps its looks", `<p style="color:red" class=x>Hello <b>you</b></p>`, []string{`<p style="color:red" class="x">Hello <b>you</b></p>`}, nil, 0, 0},
		{"scripts go with what is in them", `a<script>alert(1)</script>b`, []string{"ab"}, []string{"alert"}, 0, 1},
		{"handlers go", `<p onclick="x()" onmouseover=y()>t</p><body onload=z()>`, []string{"<p>t</p>"}, []string{"onclick", "onload", "onmouse"}, 0, 0},
		{"a link says where it leads and leads nowhere", `<a href="https://evil.example/?q=1" title="Your bank" ping="https://evil.example">bank</a>`, []string{`<a title="leads to https://evil.example/?q=1">bank</a>`}, []string{"href", "ping", "Your bank"}, 0, 0},
		{"a remote picture is not there", `<img src="https://evil.example/p.gif?who=7" alt="logo" width=1>`, []string{"picture, not fetched: logo"}, []string{"<img"}, 1, 0},
		{"nor one that is attached", `<img src="cid:logo@x">`, []string{"picture, not fetched"}, []string{"<img"}, 1, 0},
		{"a picture inside stays", `<img src="data:image/png;base64,AAAA" srcset="https://evil.example/2x 2x">`, []string{`<img src="data:image/png;base64,AAAA"/>`}, []string{"srcset", "evil"}, 0, 0},
		{"nothing tells the browser to connect", `<link rel=preconnect href=//evil.example><meta http-equiv=refresh content="0;url=//evil.example"><base href=//evil.example>x`, []string{"x"}, []string{"evil", "<link", "<meta http", "<base"}, 0, 3},
		{"frames, objects and svg go", `<iframe srcdoc="<script>1</script>"></iframe><object data=x></object><svg onload=x><a xlink:href="javascript:1">s</a></svg>y`, []string{"y"}, []string{"iframe", "object", "svg", "javascript"}, 0, 3},
		{"forms send nothing", `<form action=//evil.example><input name=p type=password autofocus formaction=//evil.example><button>Approve</button></form>`, []string{"disabled"}, []string{"evil", "autofocus", "action="}, 0, 0},
		{"a body's picture goes", `<body background="https://evil.example/b.png" bgcolor=#fff><table background=//evil.example>`, nil, []string{"evil"}, 0, 0},
		{"what a noscript holds is shown, as where no script runs", `<noscript><p>seen</p></noscript>`, []string{"seen"}, nil, 0, 0},
		{"a style fetches nothing", `<style>@IMPORT url(//evil.example/x);p{background:URL( "//evil.example/p")}b{background:url(data:image/png;base64,AA)}</style><p style="background:image-set('//evil.example' 1x)">`, []string{"url(data:image/png;base64,AA)", "left-out("}, []string{"@import", "@IMPORT", "URL(", "image-set"}, 0, 0},
		{"nor in escapes", `<p style="background:u\72l(//evil.example)">t</p>`, []string{`<p style="">t</p>`}, []string{"evil"}, 0, 0},
		{"comments go", `<!--[if mso]>hidden<![endif]-->z`, []string{"z"}, []string{"hidden"}, 0, 0},
		{"nothing at all", ``, []string{"<!doctype html>"}, nil, 0, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, remote, left, err := console.Rendered(tt.doc)
			if err != nil {
				t.Fatal(err)
			}
			_, body, _ := strings.Cut(got, "</style>")
			for _, want := range tt.want {
				if !strings.Contains(got, want) {
					t.Errorf("got %q, without %q", body, want)
				}
			}
			for _, not := range tt.without {
				if strings.Contains(body, not) {
					t.Errorf("got %q, with %q", body, not)
				}
			}
			if remote != tt.remote || left != tt.left {
				t.Errorf("got %d pictures elsewhere and %d left out, want %d and %d", remote, left, tt.remote, tt.left)
			}
		})
	}
	if _, _, _, err := console.Rendered(strings.Repeat("x", 1<<20+1)); err == nil {
		t.Error("HTML of more than a megabyte was rendered")
	}
	if _, _, _, err := console.Rendered(strings.Repeat("<div>", 100_000)); err == nil {
		t.Error("HTML of 100000 levels was rendered")
	}
}

// FuzzRendered: whatever the mail, no element and no attribute of the frame
// runs, fetches, leads or sends.
func FuzzRendered(f *testing.F) {
	for _, seed := range []string{
		"<p>x</p>", `<a href=javascript:1 xlink:href=x>`, `<img src=//x><img src=data:image/gif;base64,AA onerror=1>`, `<svg><style><img src=x onerror=1></style></svg>`,
		`<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=1&gt;">`, `<noscript><p title="</noscript><img src=x onerror=1>">`, `<form><math><mtext></form><form><mglyph><style></math><img src onerror=1>`,
		`<template><script>1</script></template>`, `<plaintext><script>`, "<xmp><img src=x></xmp>", "<textarea><script>1</script></textarea>", "<select><iframe src=x>", "<title><script>1</script></title>", `<frameset onload=1>`, "\x00<scr\x00ipt>",
	} {
		f.Add(seed)
	}
	bad := []string{"script", "link", "base", "iframe", "frame", "object", "embed", "svg", "math", "template", "audio", "video", "source"}
	f.Fuzz(func(t *testing.T, doc string) {
		got, _, _, err := console.Rendered(doc)
		if err != nil {
			return
		}
		metas := 0
		z := html.NewTokenizer(strings.NewReader(got))
		for tt := z.Next(); tt != html.ErrorToken; tt = z.Next() {
			if tt != html.StartTagToken && tt != html.SelfClosingTagToken {
				continue
			}
			tok := z.Token()
			if tok.Data == "meta" {
				metas++
			}
			if slices.Contains(bad, tok.Data) {
				t.Errorf("%q became %q, with <%s>", doc, got, tok.Data)
			}
			for _, a := range tok.Attr {
				key := strings.ToLower(a.Key)
				fetches := slices.Contains([]string{"href", "srcset", "action", "formaction", "background", "poster", "data", "ping", "srcdoc", "xlink:href"}, key)
				if strings.HasPrefix(key, "on") || fetches || key == "src" && !strings.HasPrefix(strings.ToLower(strings.TrimSpace(a.Val)), "data:image/") {
					t.Errorf("%q became %q, with %s=%q", doc, got, a.Key, a.Val)
				}
			}
		}
		if metas != 1 {
			t.Errorf("%q became %q, with %d meta elements", doc, got, metas)
		}
	})
}

func TestSafeName(t *testing.T) {
	for _, tt := range []struct{ name, got, want string }{
		{"as it is", "totals.csv", "totals.csv"},
		{"in other letters", "Überblick März.pdf", "Überblick März.pdf"},
		{"a folder", "../../etc/passwd", "passwd"},
		{"a folder of Windows", `C:\autoexec.bat`, "autoexec.bat"},
		{"hidden", ".bashrc", "bashrc"},
		{"turned round", "invoice\u202efdp.exe", "invoice_fdp.exe"},
		{"a header of its own", "a\r\nSet-Cookie: x=1", "a__Set-Cookie_ x=1"},
		{"a device", "NUL.txt", "_NUL.txt"},
		{"marks of a shell and of a tag", `a"<script>|b?.txt`, "a__script__b_.txt"},
		{"nothing", "", "unnamed"},
		{"only dots", "...", "unnamed"},
		{"not UTF-8", "a\xffb.txt", "a_b.txt"},
		{"long", strings.Repeat("ä", 200) + ".pdf", strings.Repeat("ä", 58) + ".pdf"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := console.SafeName(tt.got); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func FuzzSafeName(f *testing.F) {
	f.Add("a/b.txt")
	f.Add("con. .x")
	f.Add(strings.Repeat("\u0301", 300) + "." + strings.Repeat("x", 30))
	f.Fuzz(func(t *testing.T, name string) {
		got := console.SafeName(name)
		if got == "" || len(got) > 140 || strings.ContainsAny(got, "/\\\"\r\n\x00") || strings.HasPrefix(got, ".") || strings.ContainsFunc(got, unicode.IsControl) {
			t.Errorf("%q became %q", name, got)
		}
		if h := mime.FormatMediaType("attachment", map[string]string{"filename": got}); h == "" || strings.ContainsAny(h, "\r\n") {
			t.Errorf("%q cannot be written in a header: %q", got, h)
		}
	})
}

// TestFrameIsBoundToTheDigest: what an email looks like is a document of its own, of exactly the
// bytes that the page shows, in which nothing runs.
func TestFrameIsBoundToTheDigest(t *testing.T) {
	f := setup(t)
	f.enter()
	d := draft()
	d.HTML = `<p>Totals <b>by region</b></p><script>parent.document.forms[0].submit()</script><img src="https://evil.example/open.gif">`
	d.Attachments = append(d.Attachments, mail.Attachment{Name: "<img src=x>.html", ContentType: "text/html", Data: []byte("<script>alert(document.domain)</script>")})
	a := f.propose(d)
	page := f.get("/console/actions/" + a.ID)
	src := "/console/actions/" + a.ID + "/frame?digest=" + a.Hex()
	contains(t, "page", page.body, `<iframe class="mail" sandbox="" `, `src="`+src+`"`, "1 remote image was not loaded", "Message source", "Content-Type: multipart/")
	got := f.bytes(src)
	if got.status != http.StatusOK || strings.Contains(got.body, "evil.example/open.gif\" alt") || strings.Contains(got.body, "forms[0]") {
		t.Errorf("frame: %d, %s", got.status, got.body)
	}
	contains(t, "frame", got.body, "Totals <b>by region</b>")
	if csp := got.header.Get("Content-Security-Policy"); csp != "default-src 'none'; img-src data:; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'; frame-ancestors 'self'; sandbox" {
		t.Errorf("frame's policy: %q", csp)
	}
	// Other bytes than the page showed, those of no action, and another's.
	for path, want := range map[string]int{
		"/console/actions/" + a.ID + "/frame":                                            http.StatusConflict,
		"/console/actions/" + a.ID + "/frame?digest=" + strings.Repeat("0", 64):          http.StatusConflict,
		"/console/actions/act_" + strings.Repeat("A", 26) + "/frame?digest=" + a.Hex():   http.StatusNotFound,
		"/console/actions/" + a.ID + "/files/2?digest=" + a.Hex():                        http.StatusNotFound,
		"/console/actions/" + a.ID + "/files/-1?digest=" + a.Hex():                       http.StatusNotFound,
		"/console/actions/" + a.ID + "/files/0x0?digest=" + url.QueryEscape(a.Hex()):     http.StatusNotFound,
		"/console/actions/" + a.ID + "/files/0":                                          http.StatusConflict,
		"/console/actions/act_" + strings.Repeat("A", 26) + "/files/0?digest=" + a.Hex(): http.StatusNotFound,
		"/console/actions/act_" + strings.Repeat("A", 26) + "/raw":                       http.StatusNotFound,
	} {
		if got := f.bytes(path); got.status != want {
			t.Errorf("%s: status %d, want %d", path, got.status, want)
		}
	}
	// The files, as bytes and nothing else.
	for path, want := range map[string][2]string{
		"/files/0?digest=" + a.Hex(): {"totals.csv", "north,150\n"},
		"/files/1?digest=" + a.Hex(): {"_img src=x_.html", "<script>alert(document.domain)</script>"},
	} {
		got := f.bytes("/console/actions/" + a.ID + path)
		_, params, err := mime.ParseMediaType(got.header.Get("Content-Disposition"))
		if err != nil || got.status != http.StatusOK || params["filename"] != want[0] || got.body != want[1] {
			t.Errorf("%s: %d, %v, %q", path, got.status, params, got.body)
		}
		h := got.header
		if h.Get("Content-Type") != "application/octet-stream" || h.Get("X-Content-Type-Options") != "nosniff" || !strings.HasPrefix(h.Get("Content-Disposition"), "attachment") || !strings.Contains(h.Get("Content-Security-Policy"), "sandbox") {
			t.Errorf("%s: %v", path, h)
		}
	}
	raw := f.bytes("/console/actions/" + a.ID + "/raw")
	contains(t, "source", raw.body, "Subject: Totals by region\r\n", "totals.csv")
}
