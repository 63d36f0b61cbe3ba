package console

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"postern/internal/auth"
	"postern/internal/notify"
)

// A notificationsPage shows how a person is notified, and to owners how the project is.
type notificationsPage struct {
	Notice string
	Said   string // outcome of a form
	Email  string

	Telegram bool   // the server has a bot
	Chat     string // linked account in Telegram; empty if none
	Slack    notify.SlackAccount
	Devices  []notify.Device
	Key      string // for push messages

	Own     notify.Settings
	IsOwn   bool
	Project notify.Settings
	Rooms   []notify.Room
	Typed   roomForm // as typed into a rejected form
}

// A roomForm is the visible part of the form for a room. Credentials are never shown
// again.
type roomForm struct{ Kind, Name, Channel string }

// SlackRooms reports whether there is a room in Slack, where people can link accounts.
func (p notificationsPage) SlackRooms() bool {
	return slices.ContainsFunc(p.Rooms, func(r notify.Room) bool { return r.Kind == notify.Slack })
}

// weekdays lists the days of a week, from Monday.
var weekdays = []time.Weekday{time.Monday, time.Tuesday, time.Wednesday, time.Thursday, time.Friday, time.Saturday, time.Sunday}

// quietOn reports whether quiet hours begin on a day.
func quietOn(s notify.Settings, d time.Weekday) bool {
	return len(s.Days) == 0 || slices.Contains(s.Days, d)
}

// notificationHandlers lets people set how they are notified, and owners how the
// project is.
type notificationHandlers struct{ *Server }

const notificationsPath = "/console/account/notifications"

func (s notificationHandlers) routes() []route {
	return []route{
		{"GET", notificationsPath, views, s.page},
		{"POST", notificationsPath, views, s.setOwn},
		{"POST", notificationsPath + "/test", views, s.test},
		{"POST", notificationsPath + "/slack", views, s.linkSlack},
		{"POST", notificationsPath + "/slack/unlink", views, s.unlinkSlack},
		{"POST", notificationsPath + "/devices", views, s.addDevice},
		{"POST", notificationsPath + "/devices/{id}/remove", views, s.removeDevice},
		{"POST", notificationsPath + "/project", manages, s.setProject},
		{"POST", notificationsPath + "/rooms", manages, s.addRoom},
		{"POST", notificationsPath + "/rooms/{id}/test", manages, s.testRoom},
		{"POST", notificationsPath + "/rooms/{id}/remove", manages, s.removeRoom},
		{"GET", "/console/sw.js", open, s.worker},
	}
}

// errNoNotices means that the server sends no notices.
var errNoNotices = fmt.Errorf("%w: this server notifies nobody", errForm)

func (s notificationHandlers) page(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	return s.show(w, r, who, http.StatusOK, notificationsPage{})
}

func (s notificationHandlers) show(w http.ResponseWriter, r *http.Request, who auth.Principal, status int, v notificationsPage) error {
	n, ctx := s.conf.Notify, r.Context()
	if n == nil {
		return errNoNotices
	}
	me, err1 := s.conf.People.Me(ctx, who)
	v.Email = me.Email
	var err2, err3, err4, err5, err6, err7 error
	v.Slack, err2 = n.SlackLink(ctx, who)
	v.Devices, err3 = n.Devices(ctx, who)
	v.Own, v.IsOwn, v.Project, err4 = n.Settings(ctx, who)
	v.Rooms, err5 = n.Rooms(ctx, who)
	if n.On(notify.Push) {
		v.Key, err6 = n.PushKey(ctx)
	}
	if v.Telegram = n.On(notify.Telegram); v.Telegram {
		v.Chat, _, err7 = accountHandlers(s).chatOf(ctx, who)
	}
	if err := errors.Join(err1, err2, err3, err4, err5, err6, err7); err != nil {
		return err
	}
	return s.render(r.Context(), w, status, page{Name: "notifications", Title: "Notifications", Who: who, Here: "account", Push: v.Key != "", Body: v})
}

// done goes back to the page after a form, or shows there why nothing was changed.
func (s notificationHandlers) done(w http.ResponseWriter, r *http.Request, who auth.Principal, v notificationsPage, err error) error {
	switch {
	case errors.Is(err, notify.ErrInvalid), errors.Is(err, notify.ErrCode), errors.Is(err, notify.ErrOff):
		why := err.Error()
		if _, rest, ok := strings.Cut(why, notify.ErrInvalid.Error()+": "); ok {
			why = rest
		}
		if errors.Is(err, notify.ErrCode) {
			why = notify.ErrCode.Error()
		}
		v.Notice = "Nothing was changed: " + why + "."
		return s.show(w, r, who, http.StatusBadRequest, v)
	case errors.Is(err, auth.ErrStepUp):
		return stepUpHandlers(s).showStepUp(w, r, who, http.StatusForbidden, notificationsPath, "A room or a linked account can reach as far as you can. Confirm your second factor first.")
	case err != nil:
		return err
	}
	http.Redirect(w, r, notificationsPath, http.StatusSeeOther)
	return nil
}

// settingsOf reads the settings of a form.
func settingsOf(r *http.Request) (s notify.Settings, err error) {
	f := r.PostForm
	s = notify.Settings{Zone: strings.TrimSpace(f.Get("zone")), Silent: f.Get("silent") == "on", Detail: f.Get("detail") == "on"}
	if f.Get("quiet") == "on" {
		s.From, s.To = f.Get("from"), f.Get("to")
		if s.From == "" || s.To == "" {
			return s, fmt.Errorf("%w: quiet hours: need a begin and an end", notify.ErrInvalid)
		}
	}
	for _, d := range weekdays {
		if slices.Contains(f["day"], strconv.Itoa(int(d))) {
			s.Days = append(s.Days, d)
		}
	}
	if len(s.Days) == len(weekdays) {
		s.Days = nil
	}
	number := func(name string) int {
		v := strings.TrimSpace(f.Get(name))
		if v == "" {
			return 0
		}
		n, aerr := strconv.Atoi(v)
		if aerr != nil {
			err = fmt.Errorf("%w: %s: must be a number of minutes", notify.ErrInvalid, name)
		}
		return n
	}
	s.Collect = number("collect")
	s.EscalateAfter = number("escalate")
	for to := range strings.SplitSeq(f.Get("escalate_to"), "\n") {
		if to = strings.TrimSpace(to); to != "" {
			s.EscalateTo = append(s.EscalateTo, to)
		}
	}
	return s, err
}

func (s notificationHandlers) setOwn(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	if r.PostForm.Get("do") == "project" {
		return s.done(w, r, who, notificationsPage{}, s.conf.Notify.SetOwn(r.Context(), who, nil))
	}
	set, err := settingsOf(r)
	if err == nil {
		err = s.conf.Notify.SetOwn(r.Context(), who, &set)
	}
	return s.done(w, r, who, notificationsPage{}, err)
}

func (s notificationHandlers) setProject(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	set, err := settingsOf(r)
	if err == nil {
		err = s.conf.Notify.SetProject(r.Context(), who, set)
	}
	return s.done(w, r, who, notificationsPage{}, err)
}

// test sends who a test notice and shows the result for each channel.
func (s notificationHandlers) test(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	list, err := s.conf.Notify.SendTest(r.Context(), who, who.ID)
	if err != nil {
		return s.done(w, r, who, notificationsPage{}, err)
	}
	var said []string
	for _, t := range list {
		if t.Sent {
			said = append(said, string(t.Channel)+": sent")
		} else {
			said = append(said, string(t.Channel)+": not sent, "+t.Detail)
		}
	}
	return s.show(w, r, who, http.StatusOK, notificationsPage{Said: strings.Join(said, "; ") + "."})
}

// A slackPage asks whether an account in Slack is the person's.
type slackPage struct {
	Code    string
	Account notify.SlackAccount
}

// linkSlack shows which account a code is for, and links it once that is confirmed.
func (s notificationHandlers) linkSlack(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	n := s.conf.Notify
	if n == nil {
		return errNoNotices
	}
	code := auth.Secret(strings.TrimSpace(r.PostForm.Get("code")))
	if r.PostForm.Get("confirm") == "yes" {
		return s.done(w, r, who, notificationsPage{}, n.LinkSlack(r.Context(), who, code))
	}
	a, err := n.SlackAccountOf(r.Context(), who, code)
	if err != nil {
		return s.done(w, r, who, notificationsPage{}, err)
	}
	return s.render(r.Context(), w, http.StatusOK, page{Name: "slack", Title: "Link an account in Slack", Who: who, Here: "account", Body: slackPage{code.Reveal(), a}})
}

func (s notificationHandlers) unlinkSlack(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	return s.done(w, r, who, notificationsPage{}, s.conf.Notify.UnlinkSlack(r.Context(), who, who.ID))
}

func (s notificationHandlers) addDevice(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	f := r.PostForm
	sub := notify.Subscription{Endpoint: f.Get("endpoint"), P256DH: f.Get("p256dh"), Auth: f.Get("auth")}
	return s.done(w, r, who, notificationsPage{}, s.conf.Notify.AddDevice(r.Context(), who, sub, browserName(r.UserAgent())))
}

// browserName names the browser and the system that a User-Agent claims.
func browserName(agent string) string {
	find := func(names ...string) string {
		for _, n := range names {
			if token, name, _ := strings.Cut(n, "="); strings.Contains(agent, token) {
				return name
			}
		}
		return ""
	}
	browser := or(find("Edg/=Edge", "OPR/=Opera", "Firefox/=Firefox", "Chrome/=Chrome", "Safari/=Safari"), "A browser")
	if on := find("Android=Android", "iPhone=iPhone", "iPad=iPad", "Windows=Windows", "Mac OS X=macOS", "Linux=Linux"); on != "" {
		return browser + " on " + on
	}
	return browser
}

func (s notificationHandlers) removeDevice(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	return s.done(w, r, who, notificationsPage{}, s.conf.Notify.RemoveDevice(r.Context(), who, r.PathValue("id")))
}

func (s notificationHandlers) addRoom(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	f := r.PostForm
	typed := roomForm{f.Get("kind"), strings.TrimSpace(f.Get("name")), strings.TrimSpace(f.Get("channel"))}
	_, err := s.conf.Notify.AddRoom(r.Context(), who, notify.NewRoom{
		Kind: notify.Channel(typed.Kind), Name: typed.Name, Channel: typed.Channel, Token: auth.Secret(strings.TrimSpace(f.Get("token"))),
		Signing: auth.Secret(strings.TrimSpace(f.Get("signing"))), URL: auth.Secret(strings.TrimSpace(f.Get("url"))),
	})
	return s.done(w, r, who, notificationsPage{Typed: typed}, err)
}

func (s notificationHandlers) testRoom(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	t, err := s.conf.Notify.TestRoom(r.Context(), who, r.PathValue("id"))
	if err != nil {
		return s.done(w, r, who, notificationsPage{}, err)
	}
	if t.Sent {
		return s.show(w, r, who, http.StatusOK, notificationsPage{Said: "The test was sent."})
	}
	return s.show(w, r, who, http.StatusOK, notificationsPage{Notice: "The test was not sent: " + t.Detail})
}

func (s notificationHandlers) removeRoom(w http.ResponseWriter, r *http.Request, who auth.Principal) error {
	if s.conf.Notify == nil {
		return errNoNotices
	}
	return s.done(w, r, who, notificationsPage{}, s.conf.Notify.RemoveRoom(r.Context(), who, r.PathValue("id")))
}

// worker serves the service worker that shows push messages. Its scope is its own
// directory, /console/. It is not cached, so that a repaired one replaces a broken one.
func (s notificationHandlers) worker(w http.ResponseWriter, r *http.Request, _ auth.Principal) error {
	b, err := static.ReadFile("static/sw.js")
	if err != nil {
		return fmt.Errorf("read service worker: %w", err)
	}
	w.Header().Set("Content-Type", "text/javascript; charset=utf-8")
	http.ServeContent(w, r, "sw.js", time.Time{}, bytes.NewReader(b))
	return nil
}
