package gmailtest

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

func (s *Server) otherRoutes() map[string]endpoint {
	return map[string]endpoint{
		"GET profile":                  getProfile,
		"GET history":                  listHistory,
		"GET labels":                   listLabels,
		"POST labels":                  createLabel,
		"GET labels/{id}":              getLabel,
		"PUT labels/{id}":              updateLabel,
		"PATCH labels/{id}":            updateLabel,
		"DELETE labels/{id}":           deleteLabel,
		"POST watch":                   watch,
		"POST stop":                    func(*call) (any, error) { return nil, nil },
		"GET settings/filters":         listFilters,
		"POST settings/filters":        createFilter,
		"GET settings/filters/{id}":    getFilter,
		"DELETE settings/filters/{id}": deleteFilter,
	}
}

func getProfile(c *call) (any, error) {
	threads := map[string]bool{}
	for _, m := range c.account.messages {
		threads[m.thread] = true
	}
	return map[string]any{
		"emailAddress": c.account.address, "messagesTotal": len(c.account.messages), "threadsTotal": len(threads), "historyId": strconv.FormatUint(c.account.current, 10),
	}, nil
}

var historyTypes = map[string]string{"messageAdded": "messagesAdded", "messageDeleted": "messagesDeleted", "labelAdded": "labelsAdded", "labelRemoved": "labelsRemoved"}

func listHistory(c *call) (any, error) {
	q := c.r.URL.Query()
	since, err := strconv.ParseUint(q.Get("startHistoryId"), 10, 64)
	if err != nil {
		return nil, fail(400, "invalidArgument", "Missing or invalid startHistoryId")
	}
	if since < c.account.oldest {
		return nil, errNotFound
	}
	var found []any
	types := q["historyTypes"]
	for _, r := range c.account.records {
		if r.id <= since || len(types) > 0 && !slices.ContainsFunc(types, func(t string) bool { return historyTypes[t] == r.kind }) {
			continue
		}
		change := map[string]any{"message": r.msg}
		if r.ids != nil {
			change["labelIds"] = r.ids
		}
		found = append(found, map[string]any{"id": strconv.FormatUint(r.id, 10), "messages": []any{map[string]any{"id": r.msg["id"], "threadId": r.msg["threadId"]}}, r.kind: []any{change}})
	}
	start, _ := strconv.Atoi(q.Get("pageToken"))
	start = min(max(start, 0), len(found))
	end := min(start+most(c, 100, 500), len(found))
	out := map[string]any{"historyId": strconv.FormatUint(c.account.current, 10)}
	if end > start {
		out["history"] = found[start:end]
	}
	if end < len(found) {
		out["nextPageToken"] = strconv.Itoa(end)
	}
	return out, nil
}

func (l label) resource() map[string]any {
	out := map[string]any{"id": l.id, "name": l.name, "type": l.kind}
	if l.kind == "user" {
		out["labelListVisibility"], out["messageListVisibility"] = l.show, l.list
	}
	return out
}

func listLabels(c *call) (any, error) {
	var list []any
	for _, l := range c.account.labels {
		list = append(list, l.resource())
	}
	return map[string]any{"labels": list}, nil
}

type labelBody struct {
	Name string `json:"name"`
	Show string `json:"labelListVisibility"`
	List string `json:"messageListVisibility"`
}

func createLabel(c *call) (any, error) {
	var in labelBody
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if in.Name == "" || len(in.Name) > 225 {
		return nil, fail(400, "invalidArgument", "Invalid label name")
	}
	if slices.ContainsFunc(c.account.labels, func(l label) bool { return strings.EqualFold(l.name, in.Name) }) {
		return nil, fail(http.StatusConflict, "aborted", "Label name exists or conflicts")
	}
	id := c.account.labelID(in.Name)
	return c.account.labels[len(c.account.labels)-1].with(id, in).resource(), nil
}

func (l label) with(id string, in labelBody) label {
	l.id, l.name = id, cmp(in.Name, l.name)
	l.show, l.list = cmp(in.Show, l.show), cmp(in.List, l.list)
	return l
}

func (c *call) labelAt() (int, error) {
	i := slices.IndexFunc(c.account.labels, func(l label) bool { return l.id == c.r.PathValue("id") })
	if i < 0 {
		return 0, errNotFound
	}
	return i, nil
}

func getLabel(c *call) (any, error) {
	i, err := c.labelAt()
	if err != nil {
		return nil, err
	}
	return c.account.labels[i].resource(), nil
}

func updateLabel(c *call) (any, error) {
	i, err := c.labelAt()
	if err != nil {
		return nil, err
	}
	var in labelBody
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if c.account.labels[i].kind == "system" {
		return nil, fail(400, "invalidArgument", "Cannot modify system label")
	}
	c.account.labels[i] = c.account.labels[i].with(c.account.labels[i].id, in)
	return c.account.labels[i].resource(), nil
}

func deleteLabel(c *call) (any, error) {
	i, err := c.labelAt()
	if err != nil {
		return nil, err
	}
	l := c.account.labels[i]
	if l.kind == "system" {
		return nil, fail(400, "invalidArgument", "Cannot delete system label")
	}
	for _, m := range c.account.messages {
		c.account.relabel(m, nil, []string{l.id})
	}
	c.account.labels = slices.Delete(c.account.labels, i, i+1)
	return nil, nil
}

func watch(c *call) (any, error) {
	var in struct {
		Topic string `json:"topicName"`
	}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(in.Topic, "projects/") {
		return nil, fail(400, "invalidArgument", "Invalid topicName does not match projects/*/topics/*")
	}
	return map[string]any{"historyId": strconv.FormatUint(c.account.current, 10), "expiration": strconv.FormatInt(time.Now().Add(7*24*time.Hour).UnixMilli(), 10)}, nil
}

func listFilters(c *call) (any, error) {
	var list []any
	for _, f := range c.account.filters {
		list = append(list, f)
	}
	if list == nil {
		return map[string]any{}, nil
	}
	return map[string]any{"filter": list}, nil
}

func createFilter(c *call) (any, error) {
	if !c.may(ScopeSettings) {
		return nil, errScope
	}
	in := map[string]any{}
	if err := c.decode(&in); err != nil {
		return nil, err
	}
	id := "ANe1" + newID()
	in["id"] = id
	c.account.filters[id] = in
	return in, nil
}

func getFilter(c *call) (any, error) {
	f, ok := c.account.filters[c.r.PathValue("id")]
	if !ok {
		return nil, errNotFound
	}
	return f, nil
}

func deleteFilter(c *call) (any, error) {
	if !c.may(ScopeSettings) {
		return nil, errScope
	}
	if _, ok := c.account.filters[c.r.PathValue("id")]; !ok {
		return nil, errNotFound
	}
	delete(c.account.filters, c.r.PathValue("id"))
	return nil, nil
}
