package mailapi

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"postern/internal/api"
	"postern/internal/auth"
	"postern/internal/door"
	"postern/internal/notify"
)

// settingRoutes are the routes of settings, rooms, browsers and accounts in Slack.
func (s notifyServer) settingRoutes() []route {
	return []route{
		{"GET", "/v1/notify/settings", 0, s.getSettings},
		{"PUT", "/v1/notify/settings", maxBody, s.setOwn},
		{"DELETE", "/v1/notify/settings", 0, s.dropOwn},
		{"PUT", "/v1/notify/settings/project", maxBody, s.setProject},
		{"GET", "/v1/notify/rooms", 0, s.listRooms},
		{"POST", "/v1/notify/rooms", maxBody, s.addRoom},
		{"POST", "/v1/notify/rooms/{id}/test", 0, s.testRoom},
		{"DELETE", "/v1/notify/rooms/{id}", 0, s.removeRoom},
		{"GET", "/v1/notify/devices", 0, s.listDevices},
		{"DELETE", "/v1/notify/devices/{id}", 0, s.removeDevice},
		{"GET", "/v1/notify/slack", 0, s.slackLink},
		{"POST", "/v1/notify/slack", maxBody, s.linkSlack},
		{"POST", "/v1/notify/slack/lookup", maxBody, s.lookUpSlack},
		{"DELETE", "/v1/notify/slack/{person}", 0, s.unlinkSlack},
	}
}

func settingsOf(v notify.Settings) api.NotifySettings {
	out := api.NotifySettings{Zone: v.Zone, QuietFrom: v.From, QuietTo: v.To, QuietDays: []string{}, Silent: v.Silent, CollectMinutes: v.Collect, Detail: v.Detail}
	for _, d := range v.Days {
		out.QuietDays = append(out.QuietDays, strings.ToLower(d.String()))
	}
	return out
}

// settingsIn reads settings of a request; the notifier checks all but the days.
func settingsIn(in api.NotifySettings) (notify.Settings, error) {
	out := notify.Settings{Zone: in.Zone, From: in.QuietFrom, To: in.QuietTo, Silent: in.Silent, Collect: in.CollectMinutes, Detail: in.Detail}
	days := []string{"sunday", "monday", "tuesday", "wednesday", "thursday", "friday", "saturday"}
	for _, name := range in.QuietDays {
		i := slices.Index(days, name)
		if d := time.Weekday(i); i < 0 || slices.Contains(out.Days, d) {
			return out, fmt.Errorf("%w: quiet_days: must be different days of the week, such as monday", errRequest)
		}
		out.Days = append(out.Days, time.Weekday(i))
	}
	return out, nil
}

// getSettings answers with the caller's settings as they are now.
func (s notifyServer) getSettings(w http.ResponseWriter, r *http.Request, c caller) error {
	own, isOwn, project, err := s.notify.Settings(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.NotifySettingsStatus{Settings: settingsOf(own), Own: isOwn, Project: api.ProjectNotifySettings{
		NotifySettings: settingsOf(project), EscalateMinutes: project.EscalateAfter, EscalateTo: append([]string{}, project.EscalateTo...),
	}})
	return nil
}

// mayOwn refuses the operator, who has no account whose settings these could be.
func mayOwn(c caller, what string) error {
	if c.Operator {
		return fmt.Errorf("the operator at the machine has no account, so no %s: sign in as a person: %w", what, auth.ErrForbidden)
	}
	return nil
}

func (s notifyServer) setOwn(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayOwn(c, "own settings"); err != nil {
		return err
	}
	var in api.NotifySettings
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	v, err := settingsIn(in)
	if err != nil {
		return err
	}
	if err := s.notify.SetOwn(r.Context(), c.Principal, &v); err != nil {
		return err
	}
	return s.getSettings(w, r, c)
}

func (s notifyServer) dropOwn(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayOwn(c, "own settings"); err != nil {
		return err
	}
	if err := s.notify.SetOwn(r.Context(), c.Principal, nil); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s notifyServer) setProject(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.ProjectNotifySettings
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	v, err := settingsIn(in.NotifySettings)
	if err != nil {
		return err
	}
	v.EscalateAfter, v.EscalateTo = in.EscalateMinutes, in.EscalateTo
	if err := s.notify.SetProject(r.Context(), c.Principal, v); err != nil {
		return err
	}
	return s.getSettings(w, r, c)
}

func roomOf(r notify.Room) api.NotifyRoom {
	return api.NotifyRoom{ID: r.ID, Kind: string(r.Kind), Name: r.Name, Channel: r.Channel, CreatedAt: r.Created, CreatedBy: r.CreatedBy, Failed: r.Failed}
}

func (s notifyServer) listRooms(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.notify.Rooms(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.NotifyRoomList{Rooms: each(list, roomOf)})
	return nil
}

func (s notifyServer) addRoom(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.NewNotifyRoom
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	room, err := s.notify.AddRoom(r.Context(), c.Principal, notify.NewRoom{
		Kind: notify.Channel(in.Kind), Name: in.Name, Channel: in.Channel, Token: auth.Secret(in.Token), Signing: auth.Secret(in.SigningSecret), URL: auth.Secret(in.URL),
	})
	if err != nil {
		return err
	}
	answer(w, http.StatusCreated, roomOf(room))
	return nil
}

func (s notifyServer) testRoom(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	t, err := s.notify.TestRoom(r.Context(), c.Principal, id)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.NotifyTest{Channel: string(t.Channel), Sent: t.Sent, Detail: t.Detail})
	return nil
}

func (s notifyServer) removeRoom(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.notify.RemoveRoom(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s notifyServer) listDevices(w http.ResponseWriter, r *http.Request, c caller) error {
	list, err := s.notify.Devices(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, api.NotifyDeviceList{Devices: each(list, func(d notify.Device) api.NotifyDevice {
		return api.NotifyDevice{ID: d.ID, Name: d.Name, Host: d.Host, CreatedAt: d.Created, SentAt: moment(d.Sent), Failed: d.Failed}
	})})
	return nil
}

func (s notifyServer) removeDevice(w http.ResponseWriter, r *http.Request, c caller) error {
	id, err := id(r)
	if err != nil {
		return err
	}
	if err := s.notify.RemoveDevice(r.Context(), c.Principal, id); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func slackAccountOf(a notify.SlackAccount) api.SlackAccount {
	return api.SlackAccount{Name: a.Name, Team: a.Team, User: a.User, LinkedAt: moment(a.Since)}
}

func (s notifyServer) slackLink(w http.ResponseWriter, r *http.Request, c caller) error {
	a, err := s.notify.SlackLink(r.Context(), c.Principal)
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, slackAccountOf(a))
	return nil
}

func (s notifyServer) lookUpSlack(w http.ResponseWriter, r *http.Request, c caller) error {
	var in api.SlackCode
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	a, err := s.notify.SlackAccountOf(r.Context(), c.Principal, auth.Secret(in.Code))
	if err != nil {
		return err
	}
	answer(w, http.StatusOK, slackAccountOf(a))
	return nil
}

func (s notifyServer) linkSlack(w http.ResponseWriter, r *http.Request, c caller) error {
	if err := mayOwn(c, "account in Slack"); err != nil {
		return err
	}
	var in api.NewSlackLink
	if err := door.Decode(r, &in); err != nil {
		return err
	}
	// The attack: somebody has a colleague send the attacker's code, and then decides in
	// Slack as the colleague. So the request names the account too, as the lookup showed
	// it. A code never changes its account.
	a, err := s.notify.SlackAccountOf(r.Context(), c.Principal, auth.Secret(in.Code))
	if err != nil {
		return err
	}
	if in.Team != a.Team || in.User != a.User {
		return fmt.Errorf("%w: user: the code is for another account in Slack than team and user name; POST /v1/notify/slack/lookup names it", errRequest)
	}
	if err := s.notify.LinkSlack(r.Context(), c.Principal, auth.Secret(in.Code)); err != nil {
		return err
	}
	return s.slackLink(w, r, c)
}

func (s notifyServer) unlinkSlack(w http.ResponseWriter, r *http.Request, c caller) error {
	name, err := personInPath(r)
	if err != nil {
		return err
	}
	if err := s.notify.UnlinkSlack(r.Context(), c.Principal, name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
