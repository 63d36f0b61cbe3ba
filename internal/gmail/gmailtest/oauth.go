package gmailtest

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"
)

// A grant is what a person has allowed.
type grant struct {
	client, account string
	scopes          []string
	expires         time.Time // of access tokens and codes
	redirect        string    // of codes
	challenge       string    // PKCE
	refresh         string    // the refresh token from which an access token came
}

type grants struct {
	codes   map[string]grant
	refresh map[string]grant
	access  map[string]grant
	devices map[string]*device // by device code
	revoked int
	untick  bool
}

type device struct {
	client, user string
	scopes       []string
	expires      time.Time
	account      string // who has allowed it; empty while nobody has
	denied       bool
}

func newGrants() grants {
	return grants{codes: map[string]grant{}, refresh: map[string]grant{}, access: map[string]grant{}, devices: map[string]*device{}}
}

// Revoke ends all that account has allowed, as a person does at their Google account.
func (s *Server) Revoke(account string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range []map[string]grant{s.oauth.refresh, s.oauth.access, s.oauth.codes} {
		for t, g := range m {
			if g.account == account {
				delete(m, t)
			}
		}
	}
}

// ExpireTokens ends all access tokens. Refresh tokens stay.
func (s *Server) ExpireTokens() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.oauth.access)
}

// Untick makes people grant nothing but their e-mail address, from now on.
func (s *Server) Untick() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.oauth.untick = true
}

// Revocations returns how often a client has revoked a token.
func (s *Server) Revocations() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.oauth.revoked
}

// RefreshTokens returns the refresh tokens that are valid. A test looks for them where
// they must not be.
func (s *Server) RefreshTokens() (list []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for t := range s.oauth.refresh {
		list = append(list, t)
	}
	return list
}

// Grant returns a refresh token as if account had allowed client the scopes.
func (s *Server) Grant(client, account string, scopes ...string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := "1//" + rand.Text()
	s.oauth.refresh[t] = grant{client: client, account: account, scopes: scopes}
	return t
}

func (s *Server) oauthRoutes(mux *http.ServeMux) {
	mux.HandleFunc("GET /o/oauth2/v2/auth", s.consentPage)
	mux.HandleFunc("POST /consent", s.consent)
	mux.HandleFunc("POST /token", s.token)
	mux.HandleFunc("POST /device/code", s.deviceCode)
	mux.HandleFunc("GET /device", s.devicePage)
	mux.HandleFunc("POST /device", s.deviceConsent)
	mux.HandleFunc("POST /revoke", s.revoke)
}

func oauthFail(w http.ResponseWriter, status int, code, text string) {
	writeJSON(w, status, map[string]any{"error": code, "error_description": text})
}

var page = template.Must(template.New("").Parse(`<!doctype html><meta charset="utf-8"><title>{{.Title}}</title><h1>{{.Title}}</h1>
{{if .Error}}<p>{{.Error}}</p>{{else}}<form method="post" action="{{.Action}}">
{{range $k, $v := .Hidden}}<input type="hidden" name="{{$k}}" value="{{$v}}">{{end}}
{{if .Code}}<label>Code <input name="user_code"></label>{{end}}
<label>Account <select name="account">{{range .Accounts}}<option>{{.}}</option>{{end}}</select></label>
<button name="answer" value="allow">Continue</button> <button name="answer" value="deny">Cancel</button></form>{{end}}`))

type pageData struct {
	Title, Error, Action string
	Hidden               map[string]string
	Code                 bool
	Accounts             []string
}

func (s *Server) show(w http.ResponseWriter, status int, d pageData) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(status)
	_ = page.Execute(w, d) // the browser is gone
}

// names returns the accounts, hint first. Call with the lock.
func (s *Server) names(hint string) (list []string) {
	for a := range s.accounts {
		list = append(list, a)
	}
	slices.SortFunc(list, func(a, b string) int {
		if (a == hint) != (b == hint) {
			if a == hint {
				return -1
			}
			return 1
		}
		return strings.Compare(a, b)
	})
	return list
}

// checkClient returns what is wrong with a request for consent. Call with the lock.
func (s *Server) checkClient(q url.Values) (code, text string) {
	c, ok := s.clients[q.Get("client_id")]
	if !ok {
		return "invalid_client", "The OAuth client was not found."
	}
	u, err := url.Parse(q.Get("redirect_uri"))
	loopback := err == nil && u.Scheme == "http" && (u.Hostname() == "127.0.0.1" || u.Hostname() == "localhost" || u.Hostname() == "::1")
	if len(c.Redirects) == 0 && !loopback || len(c.Redirects) > 0 && !slices.Contains(c.Redirects, q.Get("redirect_uri")) {
		return "redirect_uri_mismatch", "The redirect URI in the request does not match the ones authorized for the OAuth client."
	}
	if q.Get("response_type") != "code" {
		return "unsupported_response_type", "Invalid response_type"
	}
	if q.Get("scope") == "" {
		return "invalid_request", "Missing required parameter: scope"
	}
	return "", ""
}

func (s *Server) consentPage(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := r.URL.Query()
	if code, text := s.checkClient(q); code != "" {
		s.show(w, http.StatusBadRequest, pageData{Title: "Access blocked", Error: "Error 400: " + code + ". " + text})
		return
	}
	hidden := map[string]string{}
	for k := range q {
		hidden[k] = q.Get(k)
	}
	s.show(w, http.StatusOK, pageData{Title: "Sign in with Google", Action: "/consent", Hidden: hidden, Accounts: s.names(q.Get("login_hint"))})
}

func (s *Server) consent(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = r.ParseForm()
	q := r.PostForm
	if code, text := s.checkClient(q); code != "" {
		s.show(w, http.StatusBadRequest, pageData{Title: "Access blocked", Error: "Error 400: " + code + ". " + text})
		return
	}
	c := s.clients[q.Get("client_id")]
	if c.TestUsers != nil && !slices.Contains(c.TestUsers, q.Get("account")) {
		s.show(w, http.StatusForbidden, pageData{Title: "Access blocked", Error: "Error 403: access_denied. The app is currently being tested, and can only be accessed by developer-approved testers."})
		return
	}
	u, _ := url.Parse(q.Get("redirect_uri")) // checked
	back := u.Query()
	back.Set("state", q.Get("state"))
	if q.Get("answer") != "allow" || s.accounts[q.Get("account")] == nil {
		back.Set("error", "access_denied")
	} else {
		scopes := strings.Fields(q.Get("scope"))
		if s.oauth.untick {
			scopes = []string{"openid"}
		}
		code := "4/0" + rand.Text()
		s.oauth.codes[code] = grant{client: c.ID, account: q.Get("account"), scopes: scopes, expires: time.Now().Add(10 * time.Minute), redirect: q.Get("redirect_uri"), challenge: q.Get("code_challenge")}
		back.Set("code", code)
		back.Set("scope", strings.Join(scopes, " "))
	}
	u.RawQuery = back.Encode()
	http.Redirect(w, r, u.String(), http.StatusFound) //nolint:gosec // it was checked against those of the client
}

func (s *Server) token(w http.ResponseWriter, r *http.Request) {
	if f := s.fault(r.URL.Path); f != nil {
		oauthFail(w, f.Status, f.Reason, f.Message)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = r.ParseForm()
	q := r.PostForm
	s.requests = append(s.requests, "POST /token "+q.Get("grant_type"))
	c, ok := s.clients[q.Get("client_id")]
	if !ok || c.Secret != q.Get("client_secret") {
		oauthFail(w, http.StatusUnauthorized, "invalid_client", "The provided client secret is invalid.")
		return
	}
	var g grant
	fresh := false
	switch q.Get("grant_type") {
	case "authorization_code":
		g, ok = s.oauth.codes[q.Get("code")]
		delete(s.oauth.codes, q.Get("code")) // once
		sum := sha256.Sum256([]byte(q.Get("code_verifier")))
		pkce := g.challenge == "" || base64.RawURLEncoding.EncodeToString(sum[:]) == g.challenge
		ok = ok && g.client == c.ID && time.Now().Before(g.expires) && pkce
		if ok && g.redirect != q.Get("redirect_uri") {
			oauthFail(w, http.StatusBadRequest, "redirect_uri_mismatch", "Bad Request")
			return
		}
		fresh = true
	case "refresh_token":
		g, ok = s.oauth.refresh[q.Get("refresh_token")]
		ok = ok && g.client == c.ID
		g.refresh = q.Get("refresh_token")
	case "urn:ietf:params:oauth:grant-type:device_code":
		d := s.oauth.devices[q.Get("device_code")]
		switch {
		case d == nil || d.client != c.ID:
		case time.Now().After(d.expires):
			oauthFail(w, http.StatusBadRequest, "expired_token", "Expired")
			return
		case d.denied:
			oauthFail(w, http.StatusForbidden, "access_denied", "Forbidden")
			return
		case d.account == "":
			oauthFail(w, http.StatusPreconditionRequired, "authorization_pending", "Precondition Required")
			return
		default:
			delete(s.oauth.devices, q.Get("device_code"))
			g, fresh = grant{client: c.ID, account: d.account, scopes: d.scopes}, true
		}
		ok = fresh
	default:
		oauthFail(w, http.StatusBadRequest, "unsupported_grant_type", "Invalid grant_type: "+q.Get("grant_type"))
		return
	}
	if !ok {
		oauthFail(w, http.StatusBadRequest, "invalid_grant", "Token has been expired or revoked.")
		return
	}
	life := s.TokenLife
	if life == 0 {
		life = time.Hour
	}
	out := map[string]any{"access_token": "ya29." + rand.Text(), "expires_in": int(life.Seconds()), "scope": strings.Join(g.scopes, " "), "token_type": "Bearer"}
	if fresh {
		g.refresh = "1//" + rand.Text()
		s.oauth.refresh[g.refresh] = g
		out["refresh_token"] = g.refresh
	}
	g.expires = time.Now().Add(life)
	s.oauth.access[out["access_token"].(string)] = g //nolint:forcetypeassert // above
	writeJSON(w, http.StatusOK, out)
}

func (s *Server) deviceCode(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = r.ParseForm()
	c, ok := s.clients[r.PostForm.Get("client_id")]
	if !ok {
		oauthFail(w, http.StatusUnauthorized, "invalid_client", "The OAuth client was not found.")
		return
	}
	if !c.Devices {
		oauthFail(w, http.StatusBadRequest, "invalid_scope", "Invalid device flow scope: "+r.PostForm.Get("scope"))
		return
	}
	code := "AH-1Ng" + rand.Text()
	t := rand.Text()
	d := &device{client: c.ID, user: t[:4] + "-" + t[4:8], scopes: strings.Fields(r.PostForm.Get("scope")), expires: time.Now().Add(30 * time.Minute)}
	s.oauth.devices[code] = d
	writeJSON(w, http.StatusOK, map[string]any{"device_code": code, "user_code": d.user, "verification_url": s.URL + "/device", "expires_in": 1800, "interval": 1})
}

func (s *Server) devicePage(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.show(w, http.StatusOK, pageData{Title: "Connect a device", Action: "/device", Code: true, Accounts: s.names("")})
}

func (s *Server) deviceConsent(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = r.ParseForm()
	for _, d := range s.oauth.devices {
		if d.user == strings.TrimSpace(r.PostForm.Get("user_code")) && s.accounts[r.PostForm.Get("account")] != nil {
			d.denied = r.PostForm.Get("answer") != "allow"
			d.account = r.PostForm.Get("account")
			s.show(w, http.StatusOK, pageData{Title: "Success", Error: "Your device is connected."})
			return
		}
	}
	s.show(w, http.StatusBadRequest, pageData{Title: "Invalid code", Error: "That code didn't work."})
}

func (s *Server) revoke(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = r.ParseForm()
	t := r.Form.Get("token")
	_, ok := s.oauth.refresh[t]
	if !ok {
		var g grant
		if g, ok = s.oauth.access[t]; ok {
			t = g.refresh
		}
	}
	if !ok {
		oauthFail(w, http.StatusBadRequest, "invalid_token", "Token expired or revoked")
		return
	}
	delete(s.oauth.refresh, t)
	for a, g := range s.oauth.access {
		if g.refresh == t {
			delete(s.oauth.access, a)
		}
	}
	s.oauth.revoked++
	writeJSON(w, http.StatusOK, map[string]any{})
}
