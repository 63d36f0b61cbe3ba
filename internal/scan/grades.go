package scan

import (
	"strings"
	"sync"
)

// Most words of the lexicon mean little alone. How much they weigh follows from
// which other concepts stand near them: "your new task is" weighs more beside
// "dear assistant" than in a project plan. The table says so, as data; what needs
// the order of words is code in rules.go.

// A near is a condition: a concept of a set stands within some letters of the
// word.
type near struct {
	letters float64 // Latin letters; wider scripts are scaled
	of      uint32  // a set of concepts
	times   int     // how many at least; 0 means one, of any concept of the set
}

// A grade is a weight for a word of a concept, under a condition.
type grade struct {
	rule  string
	score float64
	any   [][]near // one of these must hold, each in all its parts; nil always holds
}

// A conceptRule weighs the words of one concept by the first grade that holds.
type conceptRule struct {
	category Category
	grades   []grade
}

// cues are concepts that only occur where somebody speaks to a model.
const cues = 1<<address | 1<<override | 1<<newtask | 1<<secrecy | 1<<tool | 1<<toolcall | 1<<persona

// set returns the set of concepts.
func set(concepts ...concept) (bits uint32) {
	for _, c := range concepts {
		bits |= 1 << c
	}
	return bits
}

// conceptRules returns the rule of each concept whose words are weighed by what
// stands near them. It is built when the first mail is scanned.
var conceptRules = sync.OnceValue(func() map[concept]conceptRule {
	one := func(letters float64, concepts ...concept) []near {
		return []near{{letters: letters, of: set(concepts...)}}
	}
	return map[concept]conceptRule{ //nolint:exhaustive // the other concepts have code in rules.go, or only count near these
		newtask: {InstructionOverride, []grade{
			{"new_task", 0.5, [][]near{one(200, address, secrecy, tool, toolcall), {{letters: 200, of: set(override)}, {letters: 200, of: set(ai)}}}},
			{"new_task_perhaps", 0.3, [][]near{one(200, override)}},
			{"new_task_alone", 0.15, nil},
		}},
		address: {InstructionOverride, []grade{
			{"speaks_to_model", 0.7, [][]near{one(220, override, newtask, secrecy, tool, toolcall, destroy, shell, private, secret, persona)}},
			{"speaks_to_model_with_verb", 0.35, [][]near{one(120, sendv, run, instr)}},
			{"speaks_to_model_alone", 0.2, nil},
		}},
		secrecy: {InstructionOverride, []grade{
			{"asks_for_secrecy", 0.55, [][]near{one(220, address, private, secret, tool, shell, toolcall, authority), {{letters: 220, of: set(destroy, override)}, {letters: 220, of: set(ai)}}}},
			{"asks_for_secrecy_alone", 0.15, nil},
		}},
		persona: {RoleImpersonation, []grade{
			{"new_persona", 0.7, [][]near{one(160, override, address, authority, secrecy), one(80, ai), {{letters: 160, of: set(persona), times: 3}}}},
			{"new_persona_perhaps", 0.35, [][]near{one(80, instr), {{letters: 160, of: set(persona), times: 1}}}},
			{"new_persona_alone", 0.2, nil},
		}},
		authority: {RoleImpersonation, []grade{
			{"claims_authority", 0.7, [][]near{{{letters: 260, of: cues | set(sendv, destroy)}}}},
			{"claims_authority_alone", 0.3, nil},
		}},
		closer: {RoleImpersonation, []grade{
			{"forges_end_of_mail", 0.7, [][]near{{{letters: 260, of: cues | set(marker, instr)}}}},
			{"forges_end_of_mail_alone", 0.2, nil},
		}},
		tool: {ToolAbuse, []grade{
			{"commands_tool", 0.7, [][]near{one(220, address, override, newtask, secrecy)}},
			{"tool_with_target", 0.55, [][]near{{{letters: 80, of: set(run, sendv)}, {letters: 160, of: set(dest, private, secret)}}}},
			{"names_tool", 0.15, nil},
		}},
		toolcall: {ToolAbuse, []grade{
			{"tool_call_syntax", 0.78, nil},
		}},
		shell: {ToolAbuse, []grade{
			{"commands_shell", 0.75, [][]near{one(260, address, override, newtask, secrecy), one(120, ai)}},
			{"asks_to_run", 0.35, [][]near{one(90, run)}},
			{"shell_command", 0.2, nil},
		}},
		destroy: {ToolAbuse, []grade{
			{"commands_action", 0.65, [][]near{one(220, address, tool, toolcall), {{letters: 220, of: set(override, secrecy)}, {letters: 220, of: set(ai, authority)}}}},
			{"commands_action_perhaps", 0.35, [][]near{one(160, newtask, authority, override, secrecy)}},
			{"names_action", 0.05, nil},
		}},
	}
})

// grade weighs hit i by the table.
func (v *sight) grade(i int, say sayer) {
	h := v.hits[i]
	r, ok := v.rules[h.c]
	if !ok {
		return
	}
	grades := r.grades
	if h.c == tool && v.mentionsCalls(i) {
		grades = grades[len(grades)-1:]
	}
	for _, g := range grades {
		if v.holds(i, g.any) {
			say(r.category, g.rule, g.score, h.at, h.end)
			return
		}
	}
}

// mentionsCalls reports whether hit i is the phrase "tool calls" in prose and not
// an actual call.
func (v *sight) mentionsCalls(i int) bool {
	rest := v.text[v.hits[i].at:]
	return (strings.HasPrefix(rest, "tool calls") || strings.HasPrefix(rest, "function calls")) && !v.any(i, 120, set(address, secrecy))
}

// holds says whether one of several conditions holds for hit i.
func (v *sight) holds(i int, conditions [][]near) bool {
	if conditions == nil {
		return true
	}
	for _, all := range conditions {
		ok := true
		for _, n := range all {
			if n.times > 0 {
				ok = ok && v.count(i, n.letters, n.of) >= n.times
			} else {
				ok = ok && v.any(i, n.letters, n.of)
			}
		}
		if ok {
			return true
		}
	}
	return false
}
