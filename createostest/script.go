package createostest

import (
	"errors"
	"fmt"
	"strings"
)

// This file reads the part of the shell language that drivers put around a
// command: lists, pipelines, groups, redirections, quoting, variables and
// command substitution. What it does not know is an error, never a guess.

// shList is commands joined by ; and newline (""), && or ||.
type shList struct{ items []shItem }

type shItem struct {
	op  string
	cmd shNode
}

// shNode is a *shPipe, *shGroup, *shIf, *shFor or *shSimple.
type shNode any

type shPipe struct {
	negated bool
	stages  []shNode
}

type shGroup struct {
	body     *shList
	subshell bool
	redirs   []shRedir
}

type shIf struct{ cond, then, otherwise *shList }

type shFor struct {
	name  string
	words []shWord
	body  *shList
}

type shSimple struct {
	assigns []shAssign
	words   []shWord
	redirs  []shRedir
}

type shAssign struct {
	name  string
	value shWord
}

// shRedir is a redirection; the operators are < > >> <& and >&.
type shRedir struct {
	fd     int
	op     string
	target shWord
}

// shWord is the parts of one word, to be joined.
type shWord []shPart

// shPart is text as it stands, a variable, or a command to substitute.
type shPart struct {
	text   string
	name   string
	subst  *shList
	quoted bool
}

type shParser struct {
	text string
	pos  int
}

var errSyntax = errors.New("not in the part of the shell language that is emulated in memory")

func parseScript(text string) (*shList, error) {
	p := &shParser{text: text}
	list, err := p.list()
	if err == nil && p.pos < len(p.text) {
		err = p.fail()
	}
	return list, err
}

func (p *shParser) fail() error { return fmt.Errorf("%w: at byte %d", errSyntax, p.pos) }

func (p *shParser) peek() byte {
	if p.pos < len(p.text) {
		return p.text[p.pos]
	}
	return 0
}

func (p *shParser) has(token string) bool { return strings.HasPrefix(p.text[p.pos:], token) }

func (p *shParser) accept(token string) bool {
	if p.has(token) {
		p.pos += len(token)
		return true
	}
	return false
}

// blanks skips spaces and comments; with lines also newlines.
func (p *shParser) blanks(lines bool) {
	for p.pos < len(p.text) {
		switch c := p.peek(); {
		case c == ' ' || c == '\t' || lines && c == '\n':
			p.pos++
		case p.has("\\\n"):
			p.pos += 2
		case c == '#' && (p.pos == 0 || strings.IndexByte(" \t\n;", p.text[p.pos-1]) >= 0):
			for p.pos < len(p.text) && p.peek() != '\n' {
				p.pos++
			}
		default:
			return
		}
	}
}

// reserved tells whether the word comes next as a word of its own.
func (p *shParser) reserved(word string) bool {
	if !p.has(word) {
		return false
	}
	rest := p.text[p.pos+len(word):]
	return rest == "" || strings.IndexByte(" \t\n;)}&|<>", rest[0]) >= 0
}

func (p *shParser) list() (*shList, error) {
	list := &shList{}
	op := ""
	for {
		p.blanks(true)
		if p.pos >= len(p.text) || p.peek() == ')' || p.endsList() {
			if op != "" {
				return nil, p.fail()
			}
			return list, nil
		}
		cmd, err := p.pipeline()
		if err != nil {
			return nil, err
		}
		list.items = append(list.items, shItem{op, cmd})
		p.blanks(false)
		switch {
		case p.accept("&&"):
			op = "&&"
		case p.accept("||"):
			op = "||"
		case p.accept(";"), p.accept("\n"):
			op = ""
		case p.pos >= len(p.text), p.peek() == ')':
			return list, nil
		default:
			return nil, p.fail()
		}
	}
}

func (p *shParser) endsList() bool {
	for _, word := range []string{"}", "then", "elif", "else", "fi", "do", "done"} {
		if p.reserved(word) {
			return true
		}
	}
	return false
}

func (p *shParser) pipeline() (shNode, error) {
	pipe := &shPipe{}
	if p.reserved("!") {
		p.pos++
		p.blanks(false)
		pipe.negated = true
	}
	for {
		cmd, err := p.command()
		if err != nil {
			return nil, err
		}
		pipe.stages = append(pipe.stages, cmd)
		p.blanks(false)
		if p.has("||") || !p.accept("|") {
			return pipe, nil
		}
		p.blanks(true)
	}
}

func (p *shParser) command() (shNode, error) {
	switch {
	case p.reserved("{"):
		p.pos++
		return p.group("}", false)
	case p.accept("("):
		return p.group(")", true)
	case p.reserved("if"):
		p.pos += len("if")
		return p.conditional()
	case p.reserved("for"):
		p.pos += len("for")
		return p.loop()
	}
	return p.simple()
}

func (p *shParser) group(end string, subshell bool) (shNode, error) {
	body, err := p.list()
	if err != nil {
		return nil, err
	}
	if !p.accept(end) {
		return nil, p.fail()
	}
	g := &shGroup{body: body, subshell: subshell}
	for {
		p.blanks(false)
		redir, ok, err := p.redirection()
		if err != nil || !ok {
			return g, err
		}
		g.redirs = append(g.redirs, redir)
	}
}

// conditional reads from behind if, or elif, to fi.
func (p *shParser) conditional() (_ shNode, err error) {
	node := &shIf{}
	if node.cond, err = p.list(); err != nil {
		return nil, err
	}
	if !p.accept("then") {
		return nil, p.fail()
	}
	if node.then, err = p.list(); err != nil {
		return nil, err
	}
	if p.accept("elif") {
		nested, err := p.conditional()
		node.otherwise = &shList{items: []shItem{{"", nested}}}
		return node, err
	}
	if p.accept("else") {
		if node.otherwise, err = p.list(); err != nil {
			return nil, err
		}
	}
	if !p.accept("fi") {
		return nil, p.fail()
	}
	return node, nil
}

// loop reads from behind for to done.
func (p *shParser) loop() (shNode, error) {
	p.blanks(false)
	from := p.pos
	for p.pos < len(p.text) && strings.IndexByte(" \t\n;", p.peek()) < 0 {
		p.pos++
	}
	node := &shFor{name: p.text[from:p.pos]}
	p.blanks(false)
	if !envPattern.MatchString(node.name) || !p.reserved("in") {
		return nil, p.fail()
	}
	p.pos += len("in")
	for {
		p.blanks(false)
		word, err := p.word()
		if err != nil {
			return nil, err
		}
		if len(word) == 0 {
			break
		}
		node.words = append(node.words, word)
	}
	if !p.accept(";") && !p.accept("\n") {
		return nil, p.fail()
	}
	p.blanks(true)
	if !p.reserved("do") {
		return nil, p.fail()
	}
	p.pos += len("do")
	body, err := p.list()
	if err != nil {
		return nil, err
	}
	if !p.accept("done") {
		return nil, p.fail()
	}
	node.body = body
	return node, nil
}

func (p *shParser) simple() (shNode, error) {
	cmd := &shSimple{}
	for {
		p.blanks(false)
		redir, ok, err := p.redirection()
		if err != nil {
			return nil, err
		}
		if ok {
			cmd.redirs = append(cmd.redirs, redir)
			continue
		}
		if p.pos >= len(p.text) || strings.IndexByte("\n;&|)", p.peek()) >= 0 {
			break
		}
		if name := p.assignment(); name != "" && len(cmd.words) == 0 {
			p.pos += len(name) + 1
			value, err := p.word()
			if err != nil {
				return nil, err
			}
			cmd.assigns = append(cmd.assigns, shAssign{name, value})
			continue
		}
		word, err := p.word()
		if err != nil {
			return nil, err
		}
		if len(word) == 0 {
			return nil, p.fail()
		}
		cmd.words = append(cmd.words, word)
	}
	if len(cmd.words)+len(cmd.assigns)+len(cmd.redirs) == 0 {
		return nil, p.fail()
	}
	return cmd, nil
}

// assignment returns the name if NAME= comes next.
func (p *shParser) assignment() string {
	name, _, ok := strings.Cut(p.text[p.pos:], "=")
	if !ok || !envPattern.MatchString(name) {
		return ""
	}
	return name
}

func (p *shParser) redirection() (shRedir, bool, error) {
	at := p.pos
	for at < len(p.text) && p.text[at] >= '0' && p.text[at] <= '9' {
		at++
	}
	if at >= len(p.text) || p.text[at] != '<' && p.text[at] != '>' {
		return shRedir{}, false, nil
	}
	r := shRedir{fd: 1}
	if p.text[at] == '<' {
		r.fd = 0
	}
	if at > p.pos {
		r.fd = int(p.text[p.pos] - '0')
	}
	p.pos = at
	for _, op := range []string{"<&", ">&", ">>", "<", ">"} {
		if p.accept(op) {
			r.op = op
			break
		}
	}
	p.blanks(false)
	var err error
	if r.target, err = p.word(); err == nil && len(r.target) == 0 {
		err = p.fail() // also here-documents and process substitution
	}
	return r, true, err
}

// word reads one word; it is empty when none comes next.
func (p *shParser) word() (shWord, error) {
	var word shWord
	for p.pos < len(p.text) {
		switch c := p.peek(); {
		case strings.IndexByte(" \t\n;&|<>()", c) >= 0:
			return word, nil
		case c == '\'':
			end := strings.IndexByte(p.text[p.pos+1:], '\'')
			if end < 0 {
				return nil, p.fail()
			}
			word = append(word, shPart{text: p.text[p.pos+1 : p.pos+1+end], quoted: true})
			p.pos += end + 2
		case c == '"':
			p.pos++
			parts, err := p.doubleQuoted()
			if err != nil {
				return nil, err
			}
			word = append(word, parts...)
		case c == '\\' && p.pos+1 < len(p.text):
			word = append(word, shPart{text: p.text[p.pos+1 : p.pos+2], quoted: true})
			p.pos += 2
		case c == '$':
			part, err := p.dollar(false)
			if err != nil {
				return nil, err
			}
			word = append(word, part)
		case strings.IndexByte("`*?[", c) >= 0 && !p.isTest(word):
			return nil, p.fail()
		default:
			from := p.pos
			for p.pos++; p.pos < len(p.text) && strings.IndexByte(" \t\n;&|<>()'\"\\$`*?[", p.peek()) < 0; {
				p.pos++
			}
			word = append(word, shPart{text: p.text[from:p.pos]})
		}
	}
	return word, nil
}

// isTest tells whether what comes next is the command [, not a pattern.
func (p *shParser) isTest(before shWord) bool { return len(before) == 0 && p.reserved("[") }

func (p *shParser) doubleQuoted() (shWord, error) {
	word := shWord{{quoted: true}} // "" is a word too
	for p.pos < len(p.text) {
		switch c := p.peek(); {
		case c == '"':
			p.pos++
			return word, nil
		case c == '\\' && p.pos+1 < len(p.text) && strings.IndexByte("$`\"\\", p.text[p.pos+1]) >= 0:
			word = append(word, shPart{text: p.text[p.pos+1 : p.pos+2], quoted: true})
			p.pos += 2
		case c == '$':
			part, err := p.dollar(true)
			if err != nil {
				return nil, err
			}
			word = append(word, part)
		case c == '`':
			return nil, p.fail()
		default:
			from := p.pos
			for p.pos++; p.pos < len(p.text) && strings.IndexByte("\"\\$`", p.peek()) < 0; {
				p.pos++
			}
			word = append(word, shPart{text: p.text[from:p.pos], quoted: true})
		}
	}
	return nil, p.fail()
}

// dollar reads a variable or a command substitution; a lone $ is itself.
func (p *shParser) dollar(quoted bool) (shPart, error) {
	p.pos++
	part := shPart{quoted: quoted}
	switch c := p.peek(); {
	case c == '(':
		if p.has("((") {
			return part, p.fail()
		}
		p.pos++
		list, err := p.list()
		if err == nil && !p.accept(")") {
			err = p.fail()
		}
		part.subst = list
		return part, err
	case c == '{':
		end := strings.IndexByte(p.text[p.pos:], '}')
		if end < 0 || !envPattern.MatchString(p.text[p.pos+1:p.pos+end]) {
			return part, p.fail()
		}
		part.name = p.text[p.pos+1 : p.pos+end]
		p.pos += end + 1
	case strings.IndexByte("?#@$0123456789", c) >= 0 && c != 0:
		part.name = string(c)
		p.pos++
	default:
		from := p.pos
		for p.pos < len(p.text) && envPattern.MatchString(p.text[from:p.pos+1]) {
			p.pos++
		}
		if part.name = p.text[from:p.pos]; part.name == "" {
			part.text = "$"
		}
	}
	return part, nil
}
